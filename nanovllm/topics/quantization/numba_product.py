"""The product with weights in 4 bits, in compiled Python, for a few rows of activations: codes stay
packed until they are in registers.

numba_kernels.py says what a program is. No sum of floats may be reordered here, so the results are
those of groups.plain_product, to the last bit.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.numba_int8 import exact_kernel, quantize_kernel
from nanovllm.layers.numba_kernels import ZERO
from nanovllm.layers.numba_ops import run
from nanovllm.topics.quantization.groups import Groups, plain_product

FEW_ROWS = 16  # with more rows of activations, PyTorch's products are faster


@cache
def product_kernel(GROUP: int) -> Callable:
    """A kernel for groups of this size, called with (out, numbers, row_scales, sums, codes, scales,
    zeros, rows, firsts, begin, end). Row p of the result is row rows[p] of the activations times a
    matrix: rows of the weight that begin at firsts[p]. Of each matrix, it multiplies the rows from
    `begin` to `end`."""

    @exact_kernel
    def product(
        out,  # [P, out]
        numbers,  # int16 [T, groups, GROUP], with zeros behind an odd number of groups
        row_scales,  # [T, groups], and so are sums
        sums,
        codes,  # [weight's rows, pairs of groups, GROUP]
        scales,  # [weight's rows, groups], and so are zeros
        zeros,
        rows,
        firsts,
        begin,
        end,
    ):
        num_groups = row_scales.shape[1]
        for at in range(begin, end):
            for p in range(len(rows)):
                t = rows[p]
                o = firsts[p] + at
                total = ZERO
                for first in range(0, num_groups, 2):
                    low = high = np.int32(0)
                    # numba adds in 64 bits; the compiler drops what np.int32 cuts off below
                    for i in range(GROUP):
                        code = codes[o, first // 2, i]
                        low_code = np.int16(np.int16(code) & np.int16(15))
                        high_code = np.int16(code >> np.uint8(4))
                        low += np.int32(numbers[t, first, i]) * np.int32(low_code)
                        high += np.int32(numbers[t, first + 1, i]) * np.int32(high_code)
                    low -= zeros[o, first] * sums[t, first]
                    scale = row_scales[t, first] * scales[o, first]
                    total += np.float32(np.int32(low)) * scale
                    second = first + 1
                    if second < num_groups:
                        high -= zeros[o, second] * sums[t, second]
                        scale = row_scales[t, second] * scales[o, second]
                        total += np.float32(np.int32(high)) * scale
                out[p, at] = total

    return product


def product(x: Tensor, weight: Groups) -> Tensor:
    """x [T, in] times a weight in 4 bits: fp32 [T, out]."""
    if len(x) > FEW_ROWS:
        return plain_product(x, weight)
    rows = np.arange(len(x))
    return product_of_rows(x, weight, rows, np.zeros_like(rows), len(weight.scales))


def product_of_rows(
    x: Tensor, weight: Groups, rows: np.ndarray, firsts: np.ndarray, num_out: int
) -> Tensor:
    """Some rows of x, each times a matrix: `num_out` rows of the weight. See product_kernel."""
    codes, scales, zeros = weight
    assert zeros is not None, "a weight in 4 bits has zeros"
    num_rows = len(x)
    num_groups = scales.shape[1]
    group = codes.shape[2]
    numbers = torch.zeros(num_rows, num_groups + num_groups % 2, group, dtype=torch.int16)
    row_scales = torch.empty(num_rows, num_groups)
    sums = torch.empty(num_rows, num_groups, dtype=torch.int32)
    quantized = arrays(numbers, row_scales, sums)
    grouped = x.float().view(num_rows, num_groups, group)
    run(quantize_kernel, (*quantized, grouped.numpy()), num_rows, 0)
    out = torch.empty(len(rows), num_out)
    arguments = (out.numpy(), *quantized, *arrays(codes, scales, zeros), rows, firsts)
    run(product_kernel(group), arguments, num_out, out.numel() * codes[0].numel())
    return out


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]
