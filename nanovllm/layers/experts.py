"""The grouped product: rows of activations, each times the matrix of another expert.

A pair is a row and an expert. Pairs are sorted by expert, so that one product serves all rows of an
expert. The number of pairs does not depend on which experts a router chooses, so a CUDA graph can
record a grouped product.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Linear


class Pairs(NamedTuple):
    """Pairs of a row of activations and an expert, sorted by expert."""

    order: Tensor  # int64 [P]: the place of each pair before they were sorted
    ends: Tensor  # int64 [E]: where the pairs of each expert end
    # pairs of a row, which follow each other before they are sorted; 0 if each pair has its own
    # row, sorted as they are: then their results go back to where the pairs were
    top: int

    @property
    def rows(self) -> Tensor:
        """int64 [P]: the row of each pair."""
        if self.top:
            return self.order // self.top
        return torch.arange(len(self.order), device=self.order.device)

    def placed(self, results: Tensor) -> Tensor:
        """Where the results of the pairs belong."""
        if self.top:
            return results
        return torch.empty_like(results).index_copy_(0, self.order, results)


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


def choose(logits: Tensor, top: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Logits of a router [T, E] -> the weights of the chosen experts, fp32 [T, top], and the
    experts, int64 [T, top]. Of experts with equal logits, the first ones are chosen."""
    weights = logits.float().softmax(-1)
    weights, chosen = weights.sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :top]
    chosen = chosen[:, :top]
    if is_normalized:
        weights = weights / weights.sum(-1, True)
    return weights, chosen


def add_up(y: Tensor, weights: Tensor) -> Tensor:
    """Results of pairs in the order of tokens [P, out], and weights [T, top] -> the sums over the
    experts of each token [T, out]. They do not depend on the other tokens."""
    parts = y.view(*weights.shape, -1)
    parts = parts * weights.unsqueeze(-1)
    total = parts[:, 0].clone()
    for i in range(1, weights.shape[1]):
        total += parts[:, i]
    return total.to(y.dtype)


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
    return pairs.placed(torch.cat(results))
