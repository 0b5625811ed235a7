"""Rotary position embedding (RoFormer, section 3.2), with the scalings that Qwen checkpoints use."""

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn")


def rope_settings(config) -> dict:
    """The config's rope settings under one set of names: transformers 5 keeps them in `rope_parameters`,
    transformers 4 in `rope_theta` and `rope_scaling`."""
    settings = dict(
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    if settings["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"rope_type={settings['rope_type']!r} is not supported, only {', '.join(ROPE_TYPES)}"
        )
    return settings


def longest_context(config) -> int:
    """The longest context that the checkpoint supports, scaling included."""
    settings, longest = rope_settings(config), config.max_position_embeddings
    if settings["rope_type"] == "default":
        return longest
    original = settings.get("original_max_position_embeddings") or longest
    return max(longest, int(original * settings.get("factor", 1.0)))


def rope_table(config, head_dim: int, max_model_len: int) -> torch.Tensor:
    """cos and sin of the angles of every position, [max_model_len, head_dim] in fp32: first half cos, second sin.

    "dynamic" (NTK) is scaled once, for `max_model_len`, so that a token's key does not depend on how long its sequence
    becomes.
    """
    settings, scale = rope_settings(config), 1.0
    if settings["rope_type"] == "default":
        inv_freq = 1.0 / settings["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[settings["rope_type"]](
            config, None, seq_len=max_model_len
        )
    angles = torch.outer(torch.arange(max_model_len).float(), inv_freq.float())
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * scale
