"""The backend in compiled Python, for a CPU: each kernel does in one pass over memory what PyTorch
does in several.

See ops.py for what the functions do; they are tested against torch_ops.py, and
numba_attention.py says how to read the kernels. Sums are in float32; a bfloat16 is rounded once, at
the end.
"""

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.layers import torch_ops
from nanovllm.layers.numba_attention import (
    ONE,
    ZERO,
    array,
    as_float32,
    exp,
    kernel,
    rounded,
    run,
)
from nanovllm.layers.numba_attention import layout as layout
from nanovllm.layers.numba_attention import paged_attention as paged_attention
from nanovllm.layers.numba_attention import store_kv as store_kv
from nanovllm.layers.ops import Norm

CAN_BE_RECORDED = False
IS_COMPILED = True
copy_blocks = torch_ops.copy_blocks
sample = torch_ops.sample


@kernel
def add_and_norm_kernel(out, x, update, weight, eps, begin, end):
    """Program t: x[t] += update[t], then its RMSNorm."""
    size = x.shape[1]
    for t in range(begin, end):
        squares = ZERO
        for i in range(size):
            x[t, i] = rounded(as_float32(x[t, i]) + as_float32(update[t, i]), x[t, i])
            number = as_float32(x[t, i])
            squares += number * number
        scale = ONE / np.sqrt(squares / np.float32(size) + eps)
        for i in range(size):
            normed = as_float32(x[t, i]) * scale * as_float32(weight[i])
            out[t, i] = rounded(normed, x[t, i])


@kernel
def norm_and_rotate_kernel(q, k, v, qkv, q_weight, k_weight, cos_sin, eps, has_norm, begin, end):
    """Program t: the heads of token t. Each number in the first half of a head is rotated with one
    in the second."""
    num_heads = q.shape[1]
    num_kv_heads, head_dim = k.shape[1:]
    half = head_dim // 2
    numbers = np.empty(head_dim, np.float32)
    for t in range(begin, end):
        for head in range(num_heads + num_kv_heads):
            squares = ZERO
            for i in range(head_dim):
                numbers[i] = as_float32(qkv[t, head, i])
                squares += numbers[i] * numbers[i]
            if has_norm:
                scale = ONE / np.sqrt(squares / np.float32(head_dim) + eps)
                weight = q_weight if head < num_heads else k_weight
                for i in range(head_dim):
                    numbers[i] *= scale * as_float32(weight[i])
            rotated = q[t, head] if head < num_heads else k[t, head - num_heads]
            for i in range(half):
                cos = cos_sin[t, i]
                sin = cos_sin[t, half + i]
                first = numbers[i] * cos - numbers[half + i] * sin
                second = numbers[half + i] * cos + numbers[i] * sin
                rotated[i] = rounded(first, rotated[i])
                rotated[half + i] = rounded(second, rotated[i])
        for head in range(num_kv_heads):
            for i in range(head_dim):
                v[t, head, i] = qkv[t, num_heads + num_kv_heads + head, i]


@kernel
def silu_and_mul_kernel(out, x, begin, end):
    """Program t: row t."""
    size = out.shape[1]
    for t in range(begin, end):
        for i in range(size):
            gate = as_float32(x[t, i])
            up = as_float32(x[t, size + i])
            small = exp(-abs(gate))  # at most 1, so that nothing overflows
            share = ONE if gate > 0 else small
            out[t, i] = rounded(gate * share / (ONE + small) * up, x[t, i])


def add_and_norm(x: Tensor, update: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x)
    eps = np.float32(norm.eps)
    arrays = (array(out), array(x), array(update), array(norm.weight), eps)
    run(add_and_norm_kernel, arrays, len(x), x.numel())
    return x, out


def norm_and_rotate(
    qkv: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    cos_sin: Tensor,
    sizes: list[int],
) -> tuple[Tensor, ...]:
    num_tokens, _, head_dim = qkv.shape
    parts = tuple(qkv.new_empty(num_tokens, size, head_dim) for size in sizes)
    q_weight = k_weight = qkv[0, 0]  # of the right type, and not read
    eps = 0.0
    has_norm = q_norm is not None and k_norm is not None
    if q_norm is not None and k_norm is not None:
        q_weight = q_norm.weight
        k_weight = k_norm.weight
        eps = q_norm.eps or 0.0
    arrays = map(array, (*parts, qkv, q_weight, k_weight, cos_sin))
    arguments = (*arrays, np.float32(eps), has_norm)
    run(norm_and_rotate_kernel, arguments, num_tokens, qkv.numel())
    return parts


def silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty(len(x), x.shape[1] // 2)
    run(silu_and_mul_kernel, (array(out), array(x)), len(x), 4 * x.numel())
    return out
