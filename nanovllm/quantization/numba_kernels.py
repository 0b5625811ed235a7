"""kv_cache.stored in compiled Python."""

import numpy as np

from nanovllm.layers.numba_kernels import kernel

STEP = np.float32(1 / 127)
SMALLEST_SCALE = np.float32(1e-30)
ZERO = np.float32(0)
ONE = np.float32(1)


@kernel
def store_int8_kernel(k_cache, v_cache, k, v, slots, begin, end):
    """Program t stores the key and value of token t in its slot: fp32 in 8 bits, with scales.

    k and v [T, num_kv_heads, head_dim], the caches [num_blocks, block_size, num_kv_heads,
    head_dim + 4] int8.
    """
    block_size, num_kv_heads, _ = k_cache.shape[1:]
    head_dim = k.shape[2]
    for t in range(begin, end):
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for part in range(2 * num_kv_heads):
            head = part // 2
            is_key = part % 2 == 0
            row = k_cache[block, offset, head] if is_key else v_cache[block, offset, head]
            numbers = k[t, head] if is_key else v[t, head]
            largest = ZERO
            zero = ZERO  # NaN, if a number is not finite
            for i in range(head_dim):
                largest = max(largest, abs(numbers[i]))
                zero += numbers[i] * ZERO
            scale = max(largest * STEP, SMALLEST_SCALE) + zero
            inverse = ONE / scale
            is_finite = zero == ZERO
            for i in range(head_dim):
                code = np.rint(numbers[i] * inverse) if is_finite else ZERO
                row[i] = np.int8(code)
            row.view(np.float32)[-1] = scale
