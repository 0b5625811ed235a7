"""Loads a model directory: its configs, its tokenizer, and its safetensors into parameters.

Tensors go straight to their final place, dtype and device, one at a time. A layer gets its memory
with its first tensor.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary import rope_settings, window_of
from nanovllm.models.checkpoint import Reader, get_tensor, load_into
from nanovllm.models.dense import DenseModel
from nanovllm.options import is_int, refusal, shown
from nanovllm.sampling_params import SamplingParams

# by model_type: the file of models/ or topics/ that has the model
FAMILIES = {
    **dict.fromkeys(["qwen2", "qwen3", "llama", "mistral"], "dense"),
    "qwen3_moe": "experts",
    **dict.fromkeys(["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"], "hybrid"),
}
# of config.json
SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads vocab_size max_position_embeddings"
).split()


def find_model(model: str) -> Path:
    """The directory of the model: a local one, or that of a hub id, downloaded once. Raises
    ValueError if there is none."""
    path = Path(expanduser(model))  # which leaves an unknown user as it is
    if (path / "config.json").is_file():
        return path
    from nanovllm.topics.checks.files import downloaded  # chapter 05

    return downloaded(model, path, weight_names)


# --- configs and tokenizer ---


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns any error into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())  # on one line
        raise ValueError(f"{file} cannot be read: {reason}") from error


def read_json(file: Path) -> dict:
    """The object in a JSON file; an empty one if the file does not exist."""
    if not file.is_file():
        return {}
    with reading(file):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"it must be a JSON object, not {shown(settings)}")
        return settings


def load_config(path: Path):
    """The Hugging Face config of a model directory. Raises ValueError if it is damaged, or if the
    model is not supported."""
    file = path / "config.json"
    stored = read_json(file)
    with reading(file):
        # before transformers asks whether to run its code
        check_family(stored.get("model_type"), stored)
        settings = stored.get("quantization_config")
        if not isinstance(settings, dict | None):
            raise ValueError(f"quantization_config={shown(settings)} is not a JSON object")
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_family(hf_config.model_type, stored)  # transformers makes another type of some
        hf_config = model_class(hf_config).checked(hf_config)
        if is_quantized(hf_config):
            from nanovllm.topics.quantization.methods import method_of  # chapter 21

            method_of(hf_config)  # raises if it is not supported
        for name in SIZES:
            value = getattr(hf_config, name)
            if not is_int(value, 1):
                raise ValueError(f"{name}={shown(value)} is not a positive integer")
        if len(rope_settings(hf_config)) > 2 or window_of(hf_config) or is_quantized(hf_config):
            from nanovllm.topics.checks.files import check_settings  # chapter 05

            check_settings(hf_config, has_states(hf_config))
        # raises if the rope settings are invalid
        model_class(hf_config).rope_of(hf_config, max_model_len=1)
    return hf_config


def check_family(model_type: object, stored: dict) -> None:
    """Raises ValueError for a model_type that no family has, with the parts of `stored`."""
    if model_type not in [*FAMILIES]:
        from nanovllm.models.families import refusal_of  # chapter 05

        raise refusal_of(stored | {"model_type": model_type}, (*FAMILIES,))


def is_quantized(hf_config) -> bool:
    """Whether the checkpoint stores its weights in few bits."""
    return bool(getattr(hf_config, "quantization_config", None))


def load_tokenizer(path: Path):
    """The model's tokenizer, or None if its directory has none."""
    tokenizer = None
    for name in ("tokenizer.json", "vocab.json"):
        if (path / name).is_file():
            read_json(path / "tokenizer_config.json")
            with reading(path / name):
                tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            break
    if type(tokenizer) is not PreTrainedTokenizerFast:  # that one keeps to its file
        from nanovllm.topics.checks.files import check_tokenizer  # chapter 09

        check_tokenizer(tokenizer, path)
    return tokenizer


def load_generation_config(
    path: Path, hf_config, tokenizer
) -> tuple[SamplingParams, frozenset[int]]:
    """The model's default sampling parameters, and its end-of-sequence tokens: those of all its
    files, since a fine-tuned model often has its new one only in the tokenizer's."""
    file = path / "generation_config.json"
    settings = read_json(file)
    with reading(file):
        eos_token_ids = as_token_ids(settings.get("eos_token_id"))
        for source in (hf_config, tokenizer):
            eos_token_ids |= as_token_ids(getattr(source, "eos_token_id", None))
    # some models name one that they cannot draw
    return default_params(file, settings), eos_token_ids & {*range(hf_config.vocab_size)}


def as_token_ids(eos_token_id: object) -> frozenset[int]:
    """The ids in the field `eos_token_id`: a token id, a list of them, or None."""
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if ids == [None]:
        return frozenset()
    if not all(is_int(i, 0) for i in ids):
        raise refusal("eos_token_id", eos_token_id, "it must be a token id or a list of token ids")
    return frozenset(ids)


def default_params(file: Path, settings: dict) -> SamplingParams:
    """The sampling parameters in `settings`, the fields of generation_config.json."""
    is_drawn = settings.get("do_sample")
    names = ["repetition_penalty"]
    if is_drawn:
        names += ["temperature", "top_k", "top_p", "min_p"]
    values = {name: settings[name] for name in names if settings.get(name) is not None}
    if not is_drawn and file.is_file():
        values["temperature"] = 0.0
    with reading(file):
        return SamplingParams(**values)


# --- weights ---


def load_model(
    path: Path,
    hf_config,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    convert: Callable,
    read: Callable = get_tensor,
) -> DenseModel:
    """Builds the model and loads every parameter, each as `read` gives it from an open file. Raises
    ValueError if the checkpoint does not match. `convert` changes the form of a linear layer's
    weight, see device/onednn.py: one by one, so that only one has both forms at a time."""
    files = weight_files(path)
    reader = Reader()
    if is_quantized(hf_config):
        from nanovllm.topics.quantization.checkpoints import QuantizedReader  # chapter 21

        reader = QuantizedReader(hf_config, files)
    if has_states(hf_config):
        from nanovllm.topics.hybrid.checkpoint import TextReader  # chapter 23

        reader = TextReader(reader, hf_config, files)
    model = new_model(hf_config, max_model_len, dtype, device, ops)
    reader.add_parameters(model)
    missing = destinations(model)
    counts = Counter(module for module, *_ in missing.values())
    unexpected = []
    for file in files:
        with reader.tensors_of(file) as stored:
            tensors = model.view(stored)
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                if name in missing:
                    module, kind, rows = missing.pop(name)
                    if getattr(module, kind).is_meta:
                        module.to_empty(device=device, recurse=False)
                    load_into(getattr(module, kind).data[rows], read(tensors, name), name, file)
                    counts[module] -= 1
                    is_whole = not counts[module] and isinstance(module, Linear)
                    if is_whole and module is not model.lm_head:
                        convert(module, reader.groups_of(module))
                elif not ignorable(name, hf_config):
                    unexpected.append(name)
    if missing or unexpected:
        has_codes = any(name.endswith(".qweight") for name in unexpected)
        hint = " (is quantization_config missing?)" if has_codes else ""
        raise ValueError(
            f"{path} does not match its config.json: "
            f"missing tensors {shown(sorted(missing))}, {len(missing)} in all; "
            f"unexpected tensors {shown(sorted(unexpected))}, {len(unexpected)} in all{hint}"
        )
    # which may have the embedding's weight, and comes after all others
    convert(model.lm_head, reader.groups_of(model.lm_head), is_head=True)
    return model.eval()


def has_states(hf_config) -> bool:
    """Whether some layers have a state instead of a KV cache (chapter 23)."""
    return FAMILIES[hf_config.model_type] == "hybrid"


def model_class(hf_config) -> Any:
    """DenseModel, or that of another family with the same methods."""
    family = FAMILIES[hf_config.model_type]
    if family == "hybrid":
        from nanovllm.topics.hybrid.model import HybridModel  # chapter 23

        return HybridModel
    if family == "experts":
        from nanovllm.models.experts import ExpertsModel

        return ExpertsModel
    return DenseModel


def new_model(
    hf_config, max_model_len: int, dtype: torch.dtype, device: torch.device, ops: Ops
) -> DenseModel:
    """A model with parameters that have no memory yet, but the embedding.

    PyTorch's default dtype and device are left alone: they belong to the whole process.
    """
    new = model_class(hf_config)
    rope = new.rope_of(hf_config, max_model_len)
    with torch.device("meta"):  # a tensor there has a dtype and a shape, but no memory
        model = new(hf_config, rope.to(device), ops).to(dtype).requires_grad_(False)
    embedding = model.model.embed_tokens.to_empty(device=device)
    if hf_config.tie_word_embeddings:
        model.lm_head.weight = embedding.weight
    return model


def destinations(model: nn.Module) -> dict[str, tuple]:
    """The place of each tensor of the checkpoint: its module, the parameter's name there (such as
    "weight"), and a slice of rows. Biases of merged matrices are cut like the weights. A tied head
    is left out."""
    table = {}
    for name, _ in model.named_parameters():  # which names a tensor once
        prefix, _, kind = name.rpartition(".")
        layer = prefix.rpartition(".")[2]
        module = model.get_submodule(prefix)
        slices = getattr(module, "part_slices", {}) or {layer: slice(None)}
        for part, rows in slices.items():
            table[f"{prefix.removesuffix(layer)}{part}.{kind}"] = module, kind, rows
    return table


def ignorable(name: str, hf_config) -> bool:
    """Whether a tensor is not needed: some checkpoints repeat the tied head, or store the rotary
    frequencies, which we compute."""
    is_tied_head = name == "lm_head.weight" and hf_config.tie_word_embeddings
    return is_tied_head or name.endswith("rotary_emb.inv_freq")


def weight_names(path: Path) -> list[str]:
    """model.safetensors, or the files that the index lists."""
    index = path / "model.safetensors.index.json"
    name = "model.safetensors"
    if (path / name).is_file() or not index.is_file():
        return [name]
    weight_map = read_json(index).get("weight_map")
    with reading(index):
        if not isinstance(weight_map, dict):
            raise ValueError(f"weight_map={shown(weight_map)} is not an object")
    return sorted(set(map(str, weight_map.values())))


def weight_files(path: Path) -> list[Path]:
    """The files with the weights. Raises ValueError if one is missing."""
    files = [path / name for name in weight_names(path)]
    for file in files:
        if not file.is_file():
            supported = "only safetensors checkpoints are supported, whole or sharded"
            raise ValueError(f"{path} has no {file.name}: {supported}")
    return files
