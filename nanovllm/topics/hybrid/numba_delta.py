"""A decode by the gated delta rule in compiled Python: one pass over each state that reads it, and
one that writes it. numba_kernels.py says what a program is."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.numba_kernels import ONE, ZERO, kernel
from nanovllm.layers.numba_run import array, run


@kernel
def delta_kernel(out, qkv, log_decay, beta, states, slots, is_new, key_heads, begin, end):
    """Program p: head p % heads of the row p // heads."""
    heads, key_size, value_size = states.shape[1:]
    num_keys = key_heads * key_size
    held = np.empty(value_size, np.float32)
    for p in range(begin, end):
        row = p // heads
        head = p % heads
        first_key = head // (heads // key_heads) * key_size
        first_value = 2 * num_keys + head * value_size
        q = qkv[row, first_key : first_key + key_size]
        k = qkv[row, num_keys + first_key : num_keys + first_key + key_size]
        v = qkv[row, first_value : first_value + value_size]
        state = states[slots[row], head]
        result = out[row, head]
        if is_new[row]:
            state[:] = ZERO
        q_squares = ZERO
        k_squares = ZERO
        for i in range(key_size):
            q_squares += q[i] * q[i]
            k_squares += k[i] * k[i]
        q_scale = ONE / np.sqrt((q_squares + np.float32(1e-6)) * np.float32(key_size))
        k_scale = ONE / np.sqrt(k_squares + np.float32(1e-6))
        decay = np.exp(log_decay[row, head])

        held[:] = ZERO
        for i in range(key_size):
            key = k[i] * k_scale
            for j in range(value_size):
                held[j] += key * state[i, j]
        for j in range(value_size):
            held[j] = (v[j] - held[j] * decay) * beta[row, head]  # now the correction
            result[j] = ZERO
        for i in range(key_size):
            key = k[i] * k_scale
            query = q[i] * q_scale
            for j in range(value_size):
                number = state[i, j] * decay + key * held[j]
                state[i, j] = number
                result[j] += query * number


def decode(
    qkv: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    sizes: tuple[int, int],
    states: Tensor,
    slots: Tensor,
    is_new: Tensor,
) -> Tensor:
    """Computes delta.decode."""
    heads, key_size, value_size = states.shape[1:]
    out = torch.empty(len(qkv), heads, value_size)
    arrays = map(array, (out, qkv, log_decay, beta, states, slots, is_new))
    work = 4 * out.numel() * key_size
    run(delta_kernel, (*arrays, sizes[0]), len(qkv) * heads, work)
    return out
