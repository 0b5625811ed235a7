"""Families: what an error message says of a model that no file of models/ implements."""

from typing import Any

PARTS = {  # fields of config.json, and what they stand for
    "vision_config": "images",
    "audio_config": "audio",
    "kv_lora_rank": "compressed keys and values (MLA)",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "mamba_d_state": "states (Mamba)",
    "ssm_state_size": "states (Mamba)",
    "state_size": "states (Mamba)",
}
LAYERS = {"full_attention", "dense"}


def refusal_of(stored: dict[str, Any], model_types: tuple[str, ...]) -> ValueError:
    """The error for a config.json of another model_type. It names the parts that nanovllm would
    need for this model."""
    text = stored.get("text_config")
    fields = {**stored, **text} if isinstance(text, dict) else stored
    parts = [words for name, words in PARTS.items() if fields.get(name)]
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        parts += [f"{kind} layers" for kind in map(str, kinds) if kind not in LAYERS]
    has = f" ({', '.join(dict.fromkeys(parts))})" if parts else ""
    only = ", ".join(model_types)
    return ValueError(f"model_type={stored.get('model_type')!r}{has} is not supported, only {only}")
