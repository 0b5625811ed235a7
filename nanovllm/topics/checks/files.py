"""Files: finds those of a model, and says what in them is special, or is not read."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nanovllm.layers.rotary import rope_settings, window_of
from nanovllm.options import refusal

logger = logging.getLogger(__name__)

FILES = ["*.json", "*.txt", "*.jinja"]  # configs and tokenizer


def downloaded(model: str, path: Path, weight_names: Callable[[Path], list[str]]) -> Path:
    """The directory of a hub id: its configs, then the weights that its index names. Raises
    ValueError if this is none, or the path of something else."""
    if "gguf" in model.lower() or any(path.glob("*.gguf")):
        raise refusal("model", model, "GGUF is not read: take the model's safetensors")
    if not path.is_dir():
        if path.exists() or model[:1] in "/.~" or model.count("/") > 1:  # not a hub id
            raise ValueError(f"model={model!r} is not a directory")
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(model, allow_patterns=FILES, ignore_patterns="*/*"))
            snapshot_download(model, allow_patterns=weight_names(path))
        except Exception as error:
            raise ValueError(
                f"model={model!r} is not a local directory, and it could not be downloaded from "
                f"the hub: {error}"
            ) from error
    if not (path / "config.json").is_file():
        raise ValueError(f"model={model!r} is not a model directory: it has no config.json")
    return path


# --- settings ---

ALWAYS = ["rope_type", "type", "rope_theta"]
ROPE_KEYS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings beta_fast beta_slow truncate "
    "attention_factor attn_factor mscale mscale_all_dim",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
}
HYBRID_KEYS = ["partial_rotary_factor", "mrope_section", "mrope_interleaved"]
# of quantization: what the codes mean, and how they were made
CODE_KEYS = (
    "quant_method bits w_bit group_size q_group_size checkpoint_format format version sym "
    "zero_point desc_act lm_head weight_block_size modules_to_not_convert ignored_layers "
    "activation_scheme fmt scale_fmt damp_percent damp_auto_increment static_groups "
    "true_sequential model_name_or_path model_file_base_name backend do_fuse meta dataset "
    "tokenizer exllama_config use_exllama pack_dtype modules_in_block_to_quantize"
).split()


def check_settings(hf_config, has_states: bool) -> None:
    """Logs what is special in a supported config: a sliding window, and keys that are not read."""
    settings = rope_settings(hf_config)
    if not getattr(hf_config, "rope_scaling", None):  # transformers 4, and a file that 5 has saved
        hf_config.rope_scaling = settings
        hf_config.rope_theta = settings["rope_theta"]
    known = ROPE_KEYS[settings["rope_type"]].split() + ALWAYS
    if has_states:
        known += HYBRID_KEYS
    codes = dict(getattr(hf_config, "quantization_config", None) or {})
    for name, found, read in (("rope", settings, known), ("quantization", codes, CODE_KEYS)):
        unread = sorted({*found} - {*read})
        if unread:
            logger.warning("of the %s settings, %s is not known, and not read", name, unread)
    window = window_of(hf_config)
    if window and window < hf_config.max_position_embeddings:
        logger.warning("the context ends at %d tokens, with the model's sliding window", window)


# --- tokenizers ---

TEXTS = ("Hello world, 347 + 28 = 375", "\n    42\n\n  x\t1", " a  b", "Ünï ☃ 你好", "it's I'LL")
OTHER_TOKENIZERS = ("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model")
PARTS_OF_TOKENIZERS = ("model", "normalizer", "pre_tokenizer", "decoder")


def check_tokenizer(tokenizer: Any, path: Path) -> None:
    """Some classes of transformers make another tokenizer than that of its file. Where one reads or
    writes one of TEXTS otherwise, it gets the parts of the file's."""
    file = path / "tokenizer.json"
    if not file.is_file():
        others = [one.name for one in path.glob("*") if one.name in OTHER_TOKENIZERS]
        if tokenizer is None and others:
            has = f"{path} has {others[0]}, but no tokenizer.json"
            logger.warning("%s: prompts must be token ids", has)
        return
    stored = Tokenizer.from_file(str(file))
    text = first_difference(tokenizer.backend_tokenizer, stored)
    if text is not None:
        for name in PARTS_OF_TOKENIZERS:
            setattr(tokenizer.backend_tokenizer, name, getattr(stored, name))
        kind = type(tokenizer).__name__
        logger.warning("%s reads %r otherwise than tokenizer.json: the file counts", kind, text)
        if first_difference(tokenizer.backend_tokenizer, stored):
            logger.warning("%r still has other tokens than by tokenizer.json", text)


def first_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """The first of TEXTS that does not become the same tokens, and the same text again."""
    for text in TEXTS:
        ids = one.encode(text, add_special_tokens=False).ids
        is_same = ids == other.encode(text, add_special_tokens=False).ids
        if not is_same or one.decode(ids) != other.decode(ids):
            return text
    return None
