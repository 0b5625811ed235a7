"""Products with weights in 4 and 8 bits, in compiled Python: codes stay packed until they are in
registers.

numba_kernels.py says what a program is, and numba_step.py what a Form is. No sum of floats may be
reordered here: the results are those of groups.plain_product, and of oneDNN, to the last bit.
"""

import numpy as np
import torch

from nanovllm.layers.numba_int8 import exact_kernel, quantize_kernel, store_row
from nanovllm.layers.numba_kernels import as_float32, rounded
from nanovllm.layers.numba_lanes import LANES, add_pair
from nanovllm.layers.numba_prefetch import prefetch
from nanovllm.layers.numba_step import Activations, Form

AHEAD = 12  # rows of a weight between the one that is read and the one that memory is asked for
TILE = 4  # rows of activations, for which codes are unpacked once


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
            exact = np.float32(np.int32(total))
            number = exact * scales[o, 0] * rows.scales[t, 0]
            number += as_float32(biases[o])
            out[t, o] = rounded(number, out[t, o])


@exact_kernel
def multiply_4_bits(out, rows, weights, layer, num_rows, begin, end):
    """Program o: each row times row o of a weight in lanes: see numba_lanes.py."""
    num_pairs = weights.codes.shape[2]
    biases = weights.biases[layer]
    totals = np.empty((TILE, LANES), np.float32)
    last = num_rows - 1
    num_blocks = (end + LANES - 1) // LANES
    for block in range(begin // LANES, num_blocks):
        first_out = block * LANES
        for t in range(0, num_rows, TILE):
            totals[:] = 0
            ts = (t, min(t + 1, last), min(t + 2, last), min(t + 3, last))
            for pair in range(num_pairs):
                if t == last:
                    add_pair(totals, rows, weights, (t,), layer, block, pair)
                else:
                    add_pair(totals, rows, weights, ts, layer, block, pair)
            for o in range(max(begin, first_out), min(end, first_out + LANES)):
                for r in range(min(TILE, num_rows - t)):
                    total = totals[r, o - first_out] + as_float32(biases[o])
                    out[t + r, o] = rounded(total, out[t + r, o])


@exact_kernel
def multiply_pairs(out, rows, weights, ends, begin, end):
    """Program o: row o of each expert's matrix times the rows of its pairs: see layers/experts.py.
    The matrices of experts take the place of layers."""
    first = 0
    for expert in range(len(ends)):
        last = ends[expert]
        part = Activations(
            rows.x[first:last],
            rows.grouped[first:last],
            rows.integers[first:last],
            rows.scales[first:last],
            rows.sums[first:last],
        )
        multiply_4_bits(out[first:last], part, weights, expert, last - first, begin, end)
        first = last


IN_8_BITS = Form(integers_of, multiply_8_bits, torch.int16)  # as LLVM multiplies them
IN_4_BITS = Form(integers_of, multiply_4_bits)
