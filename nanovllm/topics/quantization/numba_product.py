"""Products with weights in 4 and 8 bits, in compiled Python, for a few rows of activations. The
kernels are in layers/numba_products.py."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.experts import Pairs
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.numba_products import bytes_of_rows, in_4_bits, pairs_kernel
from nanovllm.layers.numba_run import array, run
from nanovllm.layers.numba_step import Weights, new_rows
from nanovllm.topics.quantization import experts, int8
from nanovllm.topics.quantization.groups import Product, plain_product

FEW_ROWS = 64  # with more rows of activations, PyTorch's products are faster


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes int8.in_bytes in one pass."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    numbers = codes.view(torch.uint8)
    scales = torch.empty(len(x), 1)
    arguments = (*map(array, (codes, numbers, scales, x)),)
    run(bytes_of_rows, arguments, len(x), x.numel())
    return numbers, scales


def product(x: Tensor, weight: Groups) -> Tensor:
    """x [T, in] times a weight in 4 bits: fp32 [T, out]."""
    return plain_product(x, weight) if len(x) > FEW_ROWS else multiply(x, weight)


def multiply(
    x: Tensor,
    weight: Groups,
    ends: Tensor | None = None,
) -> Tensor:
    """x [T, in] times a weight in 4 bits: fp32 [T, out]. With the `ends` of pairs, x [P, in] is
    sorted by expert, and the weight has the matrices of all experts, one below the other."""
    codes, scales, zeros = weight
    assert zeros is not None, "a weight in 4 bits has zeros"
    num_rows = len(x)
    form = in_4_bits(codes.shape[2])
    kernel: Callable = form.multiply
    where: tuple = 0, num_rows
    num_experts = 1
    if ends is not None:
        kernel = pairs_kernel(kernel)
        where = (ends.numpy(),)
        num_experts = len(ends)
    rows = new_rows(x.float().contiguous(), form)
    run(form.prepare, (rows,), num_rows, 0)
    num_out = len(codes) // num_experts
    tensors = (codes, scales, zeros)
    parts = [part.unflatten(0, (num_experts, -1)).numpy() for part in tensors]
    parts.append(np.zeros((num_experts, num_out), np.float32))  # biases
    weights = Weights(*parts)
    out = torch.empty(num_rows, num_out)
    arguments = (out.numpy(), rows, weights, *where)
    run(kernel, arguments, num_out, out.numel() * codes[0].numel())
    return out


def of_matrix(weight: Groups) -> Quantized:
    """The product with any weight on a CPU."""
    if weight.zeros is None:
        return int8.product_of(weight, in_bytes)
    return Product(weight, product)


def product_of(weight: Groups, num_experts: int | None) -> Quantized:
    """The product with any weight. With experts in 4 bits, it is one kernel for all experts if
    there are few pairs of each."""
    one_by_one = experts.product_of(weight, num_experts, of_matrix)
    if num_experts is None or weight.zeros is None:
        return one_by_one

    def few_pairs(x: Tensor, _: Groups, pairs: Pairs) -> Tensor:
        if len(pairs.order) > FEW_ROWS * num_experts:
            return one_by_one(x, pairs)
        return pairs.placed(multiply(x[pairs.rows], weight, pairs.ends))

    return Product(weight, few_pairs)
