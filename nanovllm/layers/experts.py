"""The grouped product: rows of activations, each times the matrix of another expert.

A pair is a row and an expert. Pairs are sorted by expert, so that one product serves all rows of an
expert. The number of pairs does not depend on which experts a router chooses, so a CUDA graph can
record a grouped product.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Pairs


class Stack(Linear):
    """A matrix of each expert, one below the other: `parts` maps the names of its tensors to their
    numbers of rows, the same in each expert. `product` is a grouped product: see each_expert."""

    def __init__(
        self, in_features: int, parts: dict[str, int], num_experts: int, product: Callable
    ):
        of_all: dict[str, int] = {}
        for expert in range(num_experts):
            of_all |= {f"{expert}.{name}": size for name, size in parts.items()}
        super().__init__(in_features, of_all)
        self.num_experts = num_experts
        self.product = product

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:  # type: ignore[override]
        """x [T, in] -> [P, out]: for each pair, its row times the matrix of its expert."""
        matrices = self.weight.unflatten(0, (len(pairs.ends), -1))
        return self.product(x, matrices, pairs)


def product(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """x [T, in], matrices [E, out, in] -> [P, out], in PyTorch."""

    def multiply(rows: Tensor, expert: int) -> Tensor:
        return F.linear(rows, matrices[expert])

    return each_expert(x, pairs, multiply)


def each_expert(x: Tensor, pairs: Pairs, multiply: Callable) -> Tensor:
    """A grouped product as a loop over the experts that are hit: `multiply(rows, expert)` is that
    of one expert. No other expert's matrix is read."""
    results = []
    for expert, rows in enumerate(pairs.rows.tensor_split(pairs.ends[:-1].cpu())):
        if len(rows):
            results.append(multiply(x[rows], expert))
    return torch.cat(results)
