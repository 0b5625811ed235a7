"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor, use_triton: bool = False) -> torch.Tensor:
        """Adds x [T, size] to the residual stream, in place, and returns the norm of the sum."""
        if use_triton:
            from nanovllm.layers import fused

            return fused.add_rms_norm(x, residual, self.weight, self.eps)
        return self(residual.add_(x))
