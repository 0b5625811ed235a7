"""Rows in 8 bits, in compiled Python: the cache of topics/quantization/kv_cache.py, and the
activations of topics/quantization/numba_product.py. All kernels that call `store_row` are here: see
numba_kernels.py."""

from functools import partial

import numpy as np
from numba import njit

from nanovllm.layers.numba_kernels import as_float32, kernel

STEP = np.float32(1 / 127)
SMALLEST_SCALE = np.float32(1e-30)
ZERO = np.float32(0)
ONE = np.float32(1)
WITHOUT_SIGN = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
exact_kernel = partial(kernel, fastmath=False)


@njit(inline="always")
def store_row(row, numbers):
    """Stores the numbers as codes, and returns their scale."""
    largest = np.uint32(0)
    for number in numbers:  # the bits of positive numbers have the order of the numbers
        x = np.float32(as_float32(number))
        bits = np.uint32(x.view(np.uint32) & WITHOUT_SIGN)
        largest = np.uint32(max(largest, bits))
    is_finite = largest < INFINITE
    size = np.uint32(largest).view(np.float32)
    scale = max(size * STEP, SMALLEST_SCALE)
    inverse = ONE / scale if is_finite else ZERO
    for i in range(len(numbers)):
        x = np.float32(as_float32(numbers[i]))
        code = np.rint(x * inverse) if is_finite else ZERO
        row[i] = np.int8(code)
    return scale


@kernel
def store_int8_kernel(k_cache, v_cache, k, v, slots, begin, end):
    """Program t stores the key and value of token t in its slot: fp32 in 8 bits, with scales.

    k and v [T, num_kv_heads, head_dim], the caches [num_blocks, block_size, num_kv_heads,
    head_dim + 4] int8.
    """
    block_size, num_kv_heads, _ = k_cache.shape[1:]
    k_scales = k_cache.view(np.float32)[..., -1]
    v_scales = v_cache.view(np.float32)[..., -1]
    for t in range(begin, end):
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for head in range(num_kv_heads):
            k_scales[block, offset, head] = store_row(k_cache[block, offset, head], k[t, head])
            v_scales[block, offset, head] = store_row(v_cache[block, offset, head], v[t, head])


@exact_kernel
def quantize_kernel(numbers, scales, sums, x, begin, end):
    """Program t: each group of row t as integers, with a scale and a sum."""
    for t in range(begin, end):
        for g in range(x.shape[1]):
            scales[t, g] = store_row(numbers[t, g], x[t, g])
            total = np.int32(0)
            for number in numbers[t, g]:
                total += number
            sums[t, g] = total
