"""Products with weights in 4 and 8 bits, in compiled Python, for a few rows of activations: codes
stay packed until they are in registers.

numba_kernels.py says what a program is. No sum of floats may be reordered here, so the results are
those of groups.plain_product, and of oneDNN, to the last bit.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.numba_int8 import exact_kernel, quantize_kernel, store_row
from nanovllm.layers.numba_kernels import ZERO, as_float32, rounded
from nanovllm.layers.numba_ops import array, run
from nanovllm.layers.numba_step import Form, Rows, Weights, new_rows
from nanovllm.topics.quantization.groups import Groups, plain_product

FEW_ROWS = 16  # with more rows of activations, PyTorch's products are faster


@exact_kernel
def integers_of(rows, begin, end):
    """Program t: the groups of row t."""
    quantize_kernel(rows.integers, rows.scales, rows.sums, rows.grouped, begin, end)


@exact_kernel
def bytes_of_rows(codes, numbers, scales, x, begin, end):
    """Program t: row t as int8.in_bytes has it. `codes` and `numbers` are the same memory."""
    for t in range(begin, end):
        scales[t, 0] = store_row(codes[t], x[t])
        for i in range(codes.shape[1]):
            numbers[t, i] ^= np.uint8(128)  # adds 128 to a signed number


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes int8.in_bytes in one pass."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    numbers = codes.view(torch.uint8)
    scales = torch.empty(len(x), 1)
    run(bytes_of_rows, (*map(array, (codes, numbers, scales, x)),), len(x), x.numel())
    return numbers, scales


@exact_kernel
def multiply_8_bits(out, rows, weights, layer, num_rows, begin, end):
    """Program o: each row of integers times row o of a weight whose groups are rows."""
    codes = weights.codes[layer]
    scales = weights.scales[layer]
    biases = weights.biases[layer]
    for o in range(begin, end):
        for t in range(num_rows):
            total = np.int32(0)
            for i in range(codes.shape[2]):
                total += np.int32(rows.integers[t, 0, i]) * np.int32(np.int16(codes[o, 0, i]))
            number = np.float32(np.int32(total)) * scales[o, 0] * rows.scales[t, 0]
            if len(biases):
                number += as_float32(biases[o])
            out[t, o] = rounded(number, out[t, o])


@cache
def in_4_bits(GROUP: int) -> Form:
    """The form of weights with groups of this size. Its kernel computes the rows of the weight from
    `begin` to `end`."""

    @exact_kernel
    def multiply_4_bits(
        out,  # [T, out]
        rows,
        weights,
        layer,
        num_rows,  # T
        begin,
        end,
    ):
        codes = weights.codes[layer]
        scales = weights.scales[layer]
        zeros = weights.zeros[layer]
        biases = weights.biases[layer]
        num_groups = scales.shape[1]
        for o in range(begin, end):
            for t in range(num_rows):
                integers = rows.integers[t]
                row_scales = rows.scales[t]
                sums = rows.sums[t]
                total = ZERO
                for first in range(0, num_groups, 2):
                    low = high = np.int32(0)
                    # numba adds in 64 bits; the compiler drops what np.int32 cuts off below
                    for i in range(GROUP):
                        code = codes[o, first // 2, i]
                        low_code = np.int16(np.int16(code) & np.int16(15))
                        high_code = np.int16(code >> np.uint8(4))
                        low += np.int32(integers[first, i]) * np.int32(low_code)
                        high += np.int32(integers[first + 1, i]) * np.int32(high_code)
                    low -= zeros[o, first] * sums[first]
                    scale = row_scales[first] * scales[o, first]
                    total += np.float32(np.int32(low)) * scale
                    second = first + 1
                    if second < num_groups:
                        high -= zeros[o, second] * sums[second]
                        scale = row_scales[second] * scales[o, second]
                        total += np.float32(np.int32(high)) * scale
                if len(biases):
                    total += as_float32(biases[o])
                out[t, o] = rounded(total, out[t, o])

    return Form(integers_of, multiply_4_bits, GROUP)


IN_8_BITS = Form(integers_of, multiply_8_bits)


def product(x: Tensor, weight: Groups) -> Tensor:
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


@cache
def pairs_kernel(GROUP: int) -> Callable:
    """A kernel for the pairs of rows and experts, see layers/experts.py. The matrices of experts
    take the place of layers."""
    multiply = in_4_bits(GROUP).multiply

    @exact_kernel
    def multiply_pairs(out, rows, weights, ends, begin, end):
        """Program o: row o of each expert's matrix times the rows of its pairs."""
        first = 0
        for expert in range(len(ends)):
            last = ends[expert]
            if last > first:
                part = Rows(
                    rows.x[first:last], rows.grouped[first:last],
                    rows.integers[first:last], rows.scales[first:last], rows.sums[first:last],
                )  # fmt: skip
                multiply(out[first:last], part, weights, expert, last - first, begin, end)
            first = last

    return multiply_pairs


def product_of_pairs(x: Tensor, weight: Groups, ends: Tensor) -> Tensor:
    """x [P, in], sorted by expert, each row times a matrix [out, in] of the weight: fp32 [P, out]."""
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
