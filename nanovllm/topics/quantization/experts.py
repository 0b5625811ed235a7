"""Grouped products with quantized matrices of experts: see layers/experts.py."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanovllm.layers.experts import Pairs, each_expert
from nanovllm.topics.quantization.groups import Groups, plain_product

Product = Callable[[Tensor, Tensor, Pairs], Tensor]


def product_for(
    weight: Groups,
    num_experts: int,
    backend: str,
    product_of: Callable,
) -> Product:
    """The grouped product with a weight that has the matrices of all experts, one below the other.
    `product_of` returns the function that multiplies with one matrix."""
    if backend == "triton":
        from nanovllm.topics.quantization import triton_product

        return partial(triton_product.product_of_pairs, weight=weight)
    size = len(weight.scales) // num_experts
    products = []
    for first in range(0, len(weight.scales), size):
        matrix = rows_of(weight, slice(first, first + size))
        products.append(product_of(matrix, backend))
    if weight.zeros is not None and backend == "numba":
        return partial(few_pairs, weight=weight, products=products)
    return partial(one_by_one, products=products)


def rows_of(weight: Groups, rows: slice) -> Groups:
    zeros = weight.zeros
    if zeros is not None:
        zeros = zeros[rows]
    return Groups(weight.codes[rows], weight.scales[rows], zeros)


def one_by_one(
    x: Tensor,
    _: Tensor,
    pairs: Pairs,
    products: list,
) -> Tensor:
    """Takes the place of experts.product. The matrices are in `products`."""

    def multiply(rows: Tensor, expert: int) -> Tensor:
        return products[expert](rows)

    return each_expert(x, pairs, multiply).to(x.dtype)


def plain(
    x: Tensor,
    _: Tensor,
    pairs: Pairs,
    weight: Groups,
    size: int,
) -> Tensor:
    """Computes it in PyTorch, on any device. A matrix has `size` rows."""

    def multiply(rows: Tensor, expert: int) -> Tensor:
        matrix = rows_of(weight, slice(expert * size, (expert + 1) * size))
        return plain_product(rows, matrix)

    return each_expert(x, pairs, multiply)


def few_pairs(
    x: Tensor,
    _: Tensor,
    pairs: Pairs,
    weight: Groups,
    products: list,
) -> Tensor:
    """One kernel for all experts, in 4 bits, if there are few pairs of each."""
    from nanovllm.topics.quantization.numba_product import FEW_ROWS, multiply

    if len(pairs.rows) > FEW_ROWS * len(products):
        return one_by_one(x, _, pairs, products)
    return multiply(x[pairs.rows], weight, pairs.ends).to(x.dtype)
