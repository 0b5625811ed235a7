"""Linear layers, and the rule for loading their parameters from a checkpoint."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x W^T + b with W [out, in].

    Several projections of the same input form one matrix: `parts` maps the name of each in the
    checkpoint to its number of rows. `part_slices` is the loading rule: which rows each part fills.
    """

    def __init__(self, in_features: int, parts: int | dict[str, int], bias: bool = False):
        super().__init__()
        self.part_slices: dict[str, slice] = {}
        if isinstance(parts, int):
            out_features = parts
        else:
            out_features = 0
            for name, size in parts.items():
                self.part_slices[name] = slice(out_features, out_features + size)
                out_features += size
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.product: Callable[..., torch.Tensor] = F.linear  # or that of device/onednn.py

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)
