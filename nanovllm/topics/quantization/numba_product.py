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
    zeros, begin, end). It computes the rows of the weight from `begin` to `end`."""

    @exact_kernel
    def product(
        out,  # [T, out]
        numbers,  # int16 [T, groups, GROUP], with zeros behind an odd number of groups
        row_scales,  # [T, groups], and so are sums
        sums,
        codes,  # [out, pairs, GROUP]
        scales,  # [out, groups], and so are zeros
        zeros,
        begin,
        end,
    ):
        num_rows, num_groups = row_scales.shape
        for o in range(begin, end):
            for t in range(num_rows):
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
                out[t, o] = total

    return product


def product(x: Tensor, weight: Groups) -> Tensor:
    """x [T, in] times a weight in 4 bits: fp32 [T, out]."""
    if len(x) > FEW_ROWS:
        return plain_product(x, weight)
    codes, scales, zeros = weight
    assert zeros is not None, "a weight in 4 bits has zeros"
    num_rows = len(x)
    num_out, num_groups = scales.shape
    group = codes.shape[2]
    numbers = torch.zeros(num_rows, num_groups + num_groups % 2, group, dtype=torch.int16)
    row_scales = torch.empty(num_rows, num_groups)
    sums = torch.empty(num_rows, num_groups, dtype=torch.int32)
    rows = arrays(numbers, row_scales, sums)
    grouped = x.float().view(num_rows, num_groups, group)
    run(quantize_kernel, (*rows, grouped.numpy()), num_rows, 0)
    out = torch.empty(num_rows, num_out)
    arguments = (out.numpy(), *rows, *arrays(codes, scales, zeros))
    run(product_kernel(group), arguments, num_out, num_rows * codes.numel())
    return out


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]
