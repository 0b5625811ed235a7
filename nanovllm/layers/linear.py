"""Linear layers, and the rule by which a parameter is filled from a checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b with W [out, in].

    Several projections of the same input are one matrix: `parts` maps the name that each has in the
    checkpoint to its number of rows. `rows` is the loading rule: where each part belongs.
    """

    def __init__(self, in_features: int, parts: int | dict[str, int], bias: bool = False):
        super().__init__()
        self.rows: dict[str, slice] = {}
        out_features = parts if isinstance(parts, int) else 0
        for name, size in ({} if isinstance(parts, int) else parts).items():
            self.rows[name] = slice(out_features, out_features + size)
            out_features += size
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
