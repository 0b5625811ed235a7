"""Products with weights in 4 and 8 bits, in compiled Python, for a few rows of activations. The
kernels are in layers/numba_products.py."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.numba_ops import array, run
from nanovllm.layers.numba_products import (
    IN_8_BITS,
    bytes_of_rows,
    in_4_bits,
    integers_of,
    pairs_kernel,
)
from nanovllm.layers.numba_step import Form, Weights, new_rows
from nanovllm.topics.quantization.groups import Groups, plain_product

FEW_ROWS = 16  # with more rows of activations, PyTorch's products are faster


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes int8.in_bytes in one pass."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    numbers = codes.view(torch.uint8)
    scales = torch.empty(len(x), 1)
    arguments = (*map(array, (codes, numbers, scales, x)),)
    run(bytes_of_rows, arguments, len(x), x.numel())
    return numbers, scales


def product(
    x: Tensor,
    weight: Groups,
) -> Tensor:
    """x [T, in] times a weight in 4 bits: fp32 [T, out]."""
    if len(x) > FEW_ROWS:
        return plain_product(x, weight)
    num_rows = len(x)
    num_out = len(weight.codes)
    form = in_4_bits(weight.codes.shape[2])
    rows = new_rows(x.float().contiguous(), form)
    run(integers_of, (rows,), num_rows, 0)
    out = torch.empty(num_rows, num_out)
    weights = weights_of(weight, 1)
    arguments = (out.numpy(), rows, weights, 0, num_rows)
    run(form.multiply, arguments, num_out, num_rows * weight.codes.numel())
    return out


def product_of_pairs(
    x: Tensor,
    weight: Groups,
    ends: Tensor,
) -> Tensor:
    """x [P, in], sorted by expert, times the matrices [out, in] of a weight: fp32 [P, out]."""
    group = weight.codes.shape[2]
    rows = new_rows(x.float().contiguous(), in_4_bits(group))
    run(integers_of, (rows,), len(x), 0)
    weights = weights_of(weight, len(ends))
    num_out = weights.codes.shape[1]
    out = torch.empty(len(x), num_out)
    arguments = (out.numpy(), rows, weights, ends.numpy())
    run(pairs_kernel(group), arguments, num_out, out.numel() * weight.codes[0].numel())
    return out


def weights_of(weight: Groups, count: int) -> Weights:
    """A weight in 4 bits as `count` matrices, one below the other."""
    codes, scales, zeros = weight
    assert zeros is not None, "a weight in 4 bits has zeros"
    tensors = (codes, scales, zeros)
    parts = [part.unflatten(0, (count, -1)).numpy() for part in tensors]
    parts.append(np.zeros((count, 0), np.float32))
    return Weights(*parts)


def form_of(weight: Groups) -> Form | None:
    """How a step in one call multiplies with the weight; None if it cannot."""
    if weight.zeros is not None:
        return in_4_bits(weight.codes.shape[2])
    return IN_8_BITS if weight.scales.shape[1] == 1 else None
