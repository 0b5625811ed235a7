"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight

    def add(self, x: torch.Tensor, residual: torch.Tensor, use_triton: bool = False) -> torch.Tensor:
        """Adds x [T, size] to the residual stream, in place, and returns the norm of the sum."""
        if use_triton:
            from nanovllm.layers import fused

            return fused.add_rms_norm(x, residual, self.weight, self.eps)
        return self(residual.add_(x))
