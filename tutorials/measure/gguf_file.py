"""A model directory as one file in GGUF, the format of llama.cpp, without a tokenizer."""

import json
from pathlib import Path

# No torch: a worker imports this file in the environment of llama.cpp.
FIELDS = {  # of config.json, and GGUFWriter.add_...
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "vocab_size": "vocab_size",
}


def write_gguf(directory: Path, path: Path) -> None:
    """Matrices in float16, vectors in float32. Raises ValueError for a scaled rotation."""
    import gguf
    import numpy as np

    config = json.loads((directory / "config.json").read_bytes())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope_type {rope['rope_type']}: llama.cpp runs here with the default only"
        )
    family = config["model_type"].replace("mistral", "llama")
    fields = {method: config[name] for name, method in FIELDS.items()}
    head_dim = config.get("head_dim") or fields["embedding_length"] // fields["head_count"]
    fields |= dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head_dim)
    fields["rope_freq_base"] = config.get("rope_theta") or rope["rope_theta"]
    writer = gguf.GGUFWriter(path, family)
    for method, value in (fields | {"tokenizer_model": "no_vocab", "file_type": 1}).items():
        getattr(writer, f"add_{method}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], fields["block_count"])
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in gguf.utility.SafetensorsLocal(file).tensors.items():
            numbers = tensor.mmap_bytes().view(dtypes[tensor.dtype]).reshape(tensor.shape)
            if tensor.dtype == "BF16":  # the upper half of a float32
                numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
            if family == "llama" and (".q_proj." in name or ".k_proj." in name):
                # there, numbers 2i and 2i + 1 of a head are a pair, and not i and i + head_dim / 2
                halves = numbers.reshape(-1, 2, head_dim // 2, *numbers.shape[1:])
                numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
            dtype = np.float32 if numbers.ndim == 1 else np.float16
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(theirs, numbers.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
