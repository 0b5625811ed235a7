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
TYPES = {  # what no field of config.json tells
    "layers without rotation": ("smollm3",),
    "fused products": ("phi3", "internlm2", "chatglm", "baichuan"),
    "norms behind attention and MLP": ("olmo2", "olmo3", "glm4", "exaone4"),
    "multipliers": ("granite", "minicpm"),
    "another rotation": ("glm", "ernie4_5", "gpt_neox", "stablelm"),
    "another norm": ("nemotron", "starcoder2", "hunyuan_v1_dense"),
    "learned positions": ("gpt2", "opt"),
    "ALiBi": ("bloom", "falcon"),
    "scaled queries": ("ministral3",),
    "other biases": ("seed_oss", "internlm3"),
    "convolutions": ("lfm2",),
    "ternary weights": ("bitnet",),
}


def refusal_of(stored: dict[str, Any], model_types: tuple[str, ...]) -> ValueError:
    """The error for a config.json of another model_type. It names the parts that nanovllm would
    need for this model."""
    text = stored.get("text_config")
    fields = {**stored, **text} if isinstance(text, dict) else stored
    parts = [words for name, words in PARTS.items() if fields.get(name)]
    parts += [words for words, names in TYPES.items() if fields.get("model_type") in names]
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        parts += [f"{kind} layers" for kind in map(str, kinds) if kind not in LAYERS]
    has = f" ({', '.join(dict.fromkeys(parts))})" if parts else ""
    only = ", ".join(model_types)
    return ValueError(f"model_type={stored.get('model_type')!r}{has} is not supported, only {only}")
