"""Products with quantized weights, of one matrix or of experts: see layers/experts.py."""

from collections.abc import Callable

from torch import Tensor

from nanovllm.layers.experts import Pairs, each_expert
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.topics.quantization import int8
from nanovllm.topics.quantization.groups import Product


def product_of(
    weight: Groups,
    num_experts: int | None,
    of_matrix: Callable[[Groups], Quantized] = int8.product_of,
) -> Quantized:
    """The product with a weight. With experts, it has the matrices of all of them, one below the
    other: a product for each expert, as `of_matrix` gives it for one matrix."""
    if num_experts is None:
        return of_matrix(weight)
    codes, scales, zeros = weight
    size = len(scales) // num_experts
    products = []
    for first in range(0, len(scales), size):
        rows = slice(first, first + size)
        own_zeros = None if zeros is None else zeros[rows]
        matrix = Groups(codes[rows], scales[rows], own_zeros)
        products.append(of_matrix(matrix))

    def product(x: Tensor, _: Groups, pairs: Pairs) -> Tensor:
        def multiply(rows: Tensor, expert: int) -> Tensor:
            return products[expert](rows)

        return each_expert(x, pairs, multiply)

    return Product(weight, product)
