"""SiLU-and-multiply, the gate of Qwen's MLP."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor, use_triton: bool = False) -> torch.Tensor:
    """x [T, 2 d], gate and up side by side -> silu(gate) * up [T, d]."""
    if use_triton:
        from nanovllm.layers import fused

        return fused.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
