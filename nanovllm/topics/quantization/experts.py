"""Grouped products with quantized matrices of experts: see layers/experts.py."""

from collections.abc import Callable

from torch import Tensor

from nanovllm.layers.experts import Pairs, each_expert
from nanovllm.layers.linear import Groups, Quantized


def one_by_one(
    weight: Groups,
    num_experts: int,
    product_of: Callable[[Groups], Quantized],
) -> Callable[..., Tensor]:
    """The grouped product with a weight that has the matrices of all experts, one below the other:
    a product for each expert, as `product_of` gives it for one matrix."""
    codes, scales, zeros = weight
    size = len(scales) // num_experts
    products = []
    for first in range(0, len(scales), size):
        rows = slice(first, first + size)
        own_zeros = None if zeros is None else zeros[rows]
        matrix = Groups(codes[rows], scales[rows], own_zeros)
        products.append(product_of(matrix))

    def product(x: Tensor, _: Tensor, pairs: Pairs) -> Tensor:
        def multiply(rows: Tensor, expert: int) -> Tensor:
            return products[expert](rows)

        return each_expert(x, pairs, multiply).to(x.dtype)

    return product
