"""Linear layers, and the rule for loading their parameters from a checkpoint."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Groups(NamedTuple):
    """A weight [out, in] in few bits, in groups: see topics/quantization/groups.py."""

    codes: Tensor  # int8 [out, groups, group], or packed uint8 [out, pairs of groups, group]
    scales: Tensor  # fp32 [out, groups]
    zeros: Tensor | None  # uint8 [out, groups], with 4 bits


class Quantized(Protocol):
    """The product with a weight in few bits, which it holds."""

    group: int
    held: Groups  # perhaps in a layout of its own

    def __call__(self, x: Tensor, *pairs: Any) -> Tensor:
        """x [T, in] -> [T, out], in fp32 or the dtype of x. A grouped product takes Pairs (ops.py),
        and its result is [P, out]."""

    def weight(self) -> Groups:
        """The weight: a copy, if it is held in a layout of its own."""


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
        self.product: Callable[..., Tensor] = F.linear  # or that of device/onednn.py
        self.quantized: Quantized | None = None  # the product with a weight in few bits
        self.num_experts: int | None = None  # a Stack has a matrix for each

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)
