"""Products with weights in 4 and 8 bits, in compiled Python: codes stay packed until they are in
registers.

numba_kernels.py says what a program is, and numba_step.py what a Form is. No sum of floats may be
reordered here: the results are those of groups.plain_product, and of oneDNN, to the last bit.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from nanovllm.layers.numba_int8 import exact_kernel, quantize_kernel, store_row
from nanovllm.layers.numba_kernels import ZERO, as_float32, rounded
from nanovllm.layers.numba_prefetch import prefetch
from nanovllm.layers.numba_step import Activations, Form

AHEAD = 12  # rows of a weight between the one that is read and the one that memory is asked for


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


@exact_kernel
def multiply_8_bits(out, rows, weights, layer, num_rows, begin, end):
    """Program o: each row of integers times row o of a weight whose groups are rows."""
    codes = weights.codes[layer]
    scales = weights.scales[layer]
    biases = weights.biases[layer]
    for o in range(begin, end):
        prefetch(codes, o + AHEAD, o + AHEAD + 1)
        for t in range(num_rows):
            total = np.int32(0)
            for i in range(codes.shape[2]):
                total += np.int32(rows.integers[t, 0, i]) * np.int32(np.int16(codes[o, 0, i]))
            number = np.float32(np.int32(total)) * scales[o, 0] * rows.scales[t, 0]
            out[t, o] = rounded(number + as_float32(biases[o]), out[t, o])


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
            prefetch(codes, o + AHEAD, o + AHEAD + 1)
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
                out[t, o] = rounded(total + as_float32(biases[o]), out[t, o])

    return Form(integers_of, multiply_4_bits, GROUP)


IN_8_BITS = Form(integers_of, multiply_8_bits)


@cache
def pairs_kernel(multiply: Callable) -> Callable:
    """A kernel for the pairs of layers/experts.py: `multiply` is that of a Form. The matrices of
    experts take the place of layers."""

    @exact_kernel
    def multiply_pairs(out, rows, weights, ends, begin, end):
        """Program o: row o of each expert's matrix times the rows of its pairs."""
        first = 0
        for expert in range(len(ends)):
            last = ends[expert]
            if last > first:
                part = Activations(
                    rows.x[first:last], rows.grouped[first:last],
                    rows.integers[first:last], rows.scales[first:last], rows.sums[first:last],
                )  # fmt: skip
                multiply(out[first:last], part, weights, expert, last - first, begin, end)
            first = last

    return multiply_pairs
