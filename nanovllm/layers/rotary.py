"""Rotary position embedding (RoFormer, section 3.2), with the scalings of checkpoints."""

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def rope_settings(hf_config) -> dict:
    """The config's rope settings under one set of names.

    transformers 5 keeps them in `rope_parameters`, transformers 4 in `rope_theta` and
    `rope_scaling`. ValueError for a type that is not supported.
    """
    new = getattr(hf_config, "rope_parameters", None)
    old = getattr(hf_config, "rope_scaling", None)
    settings = dict(new or old or {})
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        raise ValueError(f"rope_type={rope_type!r} is not supported, only {supported}")
    settings["rope_type"] = rope_type
    settings.setdefault("rope_theta", getattr(hf_config, "rope_theta", None) or 10_000.0)
    return settings


def window_of(hf_config) -> int | None:
    """The tokens to which some layers of the model attend, if these are not the whole context."""
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention"]
    return getattr(hf_config, "sliding_window", None) if "sliding_attention" in kinds else None


def longest_context(hf_config) -> int:
    """The longest context that the checkpoint supports, scaling included. It ends with a sliding
    window: up to there, the window changes nothing."""
    settings = rope_settings(hf_config)
    longest = hf_config.max_position_embeddings
    if settings["rope_type"] not in ("default", "llama3"):  # Llama's number is that after scaling
        original = settings.get("original_max_position_embeddings") or longest
        longest = max(longest, int(original * settings.get("factor", 1.0)))
    return min(longest, window_of(hf_config) or longest)


def rope_table(hf_config, head_dim: int, max_model_len: int) -> torch.Tensor:
    """The angles of every position, [max_model_len, head_dim] in fp32: first half cos, second sin.

    "dynamic" (NTK) is scaled once, for `max_model_len`, so that a token's key does not depend on
    how long its sequence becomes.

    "default" has the speeds theta ** -(i / half). The other types are functions of transformers:
    ROPE_INIT_FUNCTIONS[type](config, device, seq_len) gives the speeds, and a factor for cos and
    sin.
    """
    settings = rope_settings(hf_config)
    rope_type = settings["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        inv_freq = 1.0 / settings["rope_theta"] ** exponents
        scale = 1.0
    else:
        init = ROPE_INIT_FUNCTIONS[rope_type]
        inv_freq, scale = init(hf_config, None, seq_len=max_model_len)
        if "attention_factor" not in settings:
            scale *= settings.get("attn_factor", 1.0)  # of yarn, as DeepSeek writes it
        if 2 * len(inv_freq) != head_dim:
            raise ValueError(f"partial_rotary_factor is not supported with {rope_type!r}")
    angles = torch.outer(torch.arange(max_model_len).float(), inv_freq.float())
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
