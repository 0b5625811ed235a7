"""Products with weights that are not quantized, in compiled Python.

numba_kernels.py says what a program is: here, a row of the weight. For each multiplication, a plain
loop reads two numbers. A tile of 3 outputs and 4 rows reads 7 numbers for 12 multiplications, and
its 12 sums stay in registers: there are 16 of them with AVX2. A single row has tiles of 12 outputs.
LLVM makes one vector of each sum, in both tiles, so a row's numbers are the same in any company, to
the last bit.
"""

import torch

from nanovllm.layers.numba_kernels import ZERO, as_float32, inlined, kernel, rounded
from nanovllm.layers.numba_prefetch import prefetch
from nanovllm.layers.numba_run import HAS_THREADS

FEW = 8  # rows: for so few, tiles are the fastest on any processor
ROWS = 64  # that are multiplied before the next ones: they stay in the processor's cache


def are_fastest(dtype: torch.dtype) -> bool:
    """Whether tiles of any number of rows are as fast as oneDNN's products. With AVX2, they are
    five times as fast in bfloat16. Processors with AVX-512 have products in 16 bits."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return HAS_THREADS and dtype == torch.float32
    return HAS_THREADS and capability == "AVX2"


@inlined
def put(out, t, o, total, biases):
    out[t, o] = rounded(total + as_float32(biases[o]), out[t, o])


@kernel
def multiply_tiles(out, x, weight, biases, begin, end):
    """Tiles of 3 outputs and 4 rows."""
    last = end - 1
    for first in range(0, len(x), ROWS):
        last_row = min(first + ROWS, len(x)) - 1
        for o in range(begin, end, 3):
            o1 = min(o + 1, last)
            o2 = min(o + 2, last)
            prefetch(weight, o + 12, o + 15)
            for t in range(first, last_row + 1, 4):
                t1 = min(t + 1, last_row)
                t2 = min(t + 2, last_row)
                t3 = min(t + 3, last_row)
                a0 = a1 = a2 = a3 = ZERO
                b0 = b1 = b2 = b3 = ZERO
                c0 = c1 = c2 = c3 = ZERO
                for i in range(weight.shape[1]):
                    a = as_float32(weight[o, i])
                    b = as_float32(weight[o1, i])
                    c = as_float32(weight[o2, i])
                    number = as_float32(x[t, i])
                    a0 += a * number
                    b0 += b * number
                    c0 += c * number
                    number = as_float32(x[t1, i])
                    a1 += a * number
                    b1 += b * number
                    c1 += c * number
                    number = as_float32(x[t2, i])
                    a2 += a * number
                    b2 += b * number
                    c2 += c * number
                    number = as_float32(x[t3, i])
                    a3 += a * number
                    b3 += b * number
                    c3 += c * number
                rows = (
                    (t, a0, b0, c0),
                    (t1, a1, b1, c1),
                    (t2, a2, b2, c2),
                    (t3, a3, b3, c3),
                )
                for row, total, total1, total2 in rows:
                    put(out, row, o, total, biases)
                    put(out, row, o1, total1, biases)
                    put(out, row, o2, total2, biases)


@kernel
def multiply_row(out, x, weight, biases, begin, end):
    """Tiles of 12 outputs: x [1, in], and a weight with at least 12 rows."""
    for first in range(begin, end, 12):
        o = min(first, len(weight) - 12)  # a row that is computed twice is the same
        s0 = s1 = s2 = s3 = s4 = s5 = ZERO
        s6 = s7 = s8 = s9 = s10 = s11 = ZERO
        prefetch(weight, o + 12, o + 24)
        for i in range(weight.shape[1]):
            number = as_float32(x[0, i])
            s0 += number * as_float32(weight[o, i])
            s1 += number * as_float32(weight[o + 1, i])
            s2 += number * as_float32(weight[o + 2, i])
            s3 += number * as_float32(weight[o + 3, i])
            s4 += number * as_float32(weight[o + 4, i])
            s5 += number * as_float32(weight[o + 5, i])
            s6 += number * as_float32(weight[o + 6, i])
            s7 += number * as_float32(weight[o + 7, i])
            s8 += number * as_float32(weight[o + 8, i])
            s9 += number * as_float32(weight[o + 9, i])
            s10 += number * as_float32(weight[o + 10, i])
            s11 += number * as_float32(weight[o + 11, i])
        for k, total in enumerate((s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11)):
            put(out, 0, o + k, total, biases)


@kernel
def multiply(out, x, weight, biases, begin, end):
    """Program o: all rows of x [T, in] times row o of the weight [out, in], plus its bias."""
    if len(x) == 1 and len(weight) >= 12:
        multiply_row(out, x, weight, biases, begin, end)
    else:
        multiply_tiles(out, x, weight, biases, begin, end)
