"""The backend in Triton: each kernel does in one pass over memory what PyTorch does in several.

See ops.py for what the functions do; they are tested in tests/core/test_ops.py. Sums are in fp32; a
16-bit result is rounded once, at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nanovllm.backends import torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.ops import Norms
from nanovllm.layers.triton_attention import copy_blocks as copy_blocks
from nanovllm.layers.triton_attention import layout as layout
from nanovllm.layers.triton_attention import paged_attention as paged_attention
from nanovllm.layers.triton_int8 import store_rows
from nanovllm.layers.triton_sampler import sample as sample

if TYPE_CHECKING:
    from nanovllm.backends.cuda_graphs import StepGraphs
    from nanovllm.config import Limits
    from nanovllm.layers.experts import Pairs

NAME = "triton"
COMPILES_AT_FIRST_USE = True
cache_shape = torch_ops.cache_shape
product_for = torch_ops.product_for


@triton.jit
def add_and_norm_kernel(
    out,  # [T, SIZE], residual and x, too
    residual,
    x,
    weight,  # [SIZE]
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program t: residual[t] += x[t], then its RMSNorm."""
    i = tl.arange(0, PADDED)
    is_number = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    dtype = out.dtype.element_ty
    added = tl.load(x + at, mask=is_number, other=0.0).to(tl.float32)
    before = tl.load(residual + at, mask=is_number, other=0.0).to(tl.float32)
    total = (added + before).to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    # behind the sum, which waits for all threads: in a short row, several read the same number
    tl.store(residual + at, total.to(dtype), mask=is_number)
    w = tl.load(weight + i, mask=is_number, other=0.0).to(tl.float32)
    tl.store(out + at, (total * scale * w).to(dtype), mask=is_number)


@triton.jit
def rotate_and_store_kernel(
    qkv,  # [T, heads, HEAD_DIM], `stride` from token to token
    q_weight,
    k_weight,
    cos_sin,  # [T, HEAD_DIM]
    k_cache,  # [blocks, tokens, KV_HEADS, KV_DIM], and so is v_cache
    v_cache,
    slots,
    stride,
    slot_stride,  # of the cache
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_DIM: tl.constexpr,  # with int8, a scale is behind the HEAD_DIM codes
    PADDED: tl.constexpr,  # half of a head
    ALL: tl.constexpr,  # >= HEADS + KV_HEADS, a power of two
    HAS_NORM: tl.constexpr,
):
    """Program t: RMSNorm if there is one, and rotation.

    Query heads come first, then key heads. Queries are rotated in place, and keys into their slot;
    the values are copied into it.
    """
    t = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, ALL)[:, None]
    i = tl.arange(0, PADDED)
    is_half = i < HALF
    is_number = (head < HEADS + KV_HEADS) & is_half
    is_key = (head >= HEADS) & is_number
    at = qkv + t * stride + head * HEAD_DIM + i
    x1 = tl.load(at, mask=is_number, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=is_number, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / HEAD_DIM + eps)[:, None]
        q1 = tl.load(q_weight + i, mask=is_half, other=0.0).to(tl.float32)
        k1 = tl.load(k_weight + i, mask=is_half, other=0.0).to(tl.float32)
        x1 = x1 * scale * tl.where(is_key, k1, q1)
        q2 = tl.load(q_weight + HALF + i, mask=is_half, other=0.0).to(tl.float32)
        k2 = tl.load(k_weight + HALF + i, mask=is_half, other=0.0).to(tl.float32)
        x2 = x2 * scale * tl.where(is_key, k2, q2)
    cos = tl.load(cos_sin + t * HEAD_DIM + i, mask=is_half, other=0.0)
    sin = tl.load(cos_sin + t * HEAD_DIM + HALF + i, mask=is_half, other=0.0)
    dtype = qkv.dtype.element_ty
    first = (x1 * cos - x2 * sin).to(dtype)
    second = (x2 * cos + x1 * sin).to(dtype)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:  # a padding row of a CUDA graph has none
        value = at + KV_HEADS * HEAD_DIM
        v1 = tl.load(value, mask=is_key, other=0.0)
        v2 = tl.load(value + HALF, mask=is_key, other=0.0)
        row = slot * slot_stride + (head - HEADS) * KV_DIM
        if KV_DIM > HEAD_DIM:
            store_rows(k_cache + row, i, first, second, is_key, HEAD_DIM)
            store_rows(v_cache + row, i, v1, v2, is_key, HEAD_DIM)
        else:
            tl.store(k_cache + row + i, first, mask=is_key)
            tl.store(k_cache + row + i + HALF, second, mask=is_key)
            tl.store(v_cache + row + i, v1, mask=is_key)
            tl.store(v_cache + row + i + HALF, v2, mask=is_key)
    is_query = (head < HEADS) & is_half
    tl.store(at, first, mask=is_query)
    tl.store(at + HALF, second, mask=is_query)


@triton.jit
def silu_and_mul_kernel(out, x, SIZE: tl.constexpr, PART: tl.constexpr):
    """Program (t, part): silu(gate) * up for PART of the SIZE numbers."""
    i = tl.program_id(1) * PART + tl.arange(0, PART)
    t = tl.program_id(0).to(tl.int64)
    is_number = i < SIZE
    gate = tl.load(x + 2 * t * SIZE + i, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * t + 1) * SIZE + i, mask=is_number, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + t * SIZE + i, result.to(out.dtype.element_ty), mask=is_number)


def add_and_norm(residual: Tensor, x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    padded = triton.next_power_of_2(size)
    out = torch.empty_like(x)
    tensors = (out, residual, x, norm.weight)
    add_and_norm_kernel[(len(x),)](*tensors, norm.eps, size, padded, num_warps=8)
    return residual, out


def rotate_and_store(
    qkv: Tensor, norms: Norms, cos_sin: Tensor, sizes: list[int], batch: Batch, layer: int
) -> Tensor:
    """The result is a view of qkv."""
    q_norm, k_norm = norms
    heads, kv_heads, _ = sizes
    head_dim = qkv.shape[-1]
    padded = triton.next_power_of_2(head_dim // 2)
    has_norm = q_norm is not None and k_norm is not None
    q_weight = q_norm.weight if q_norm is not None else qkv  # a kernel takes no None
    k_weight = k_norm.weight if k_norm is not None else qkv
    eps = q_norm.eps if q_norm is not None and q_norm.eps is not None else 0.0
    keys, values = batch.kv_cache.layers[layer]
    rotate_and_store_kernel[(len(qkv),)](
        qkv, q_weight, k_weight, cos_sin, keys, values, batch.slot_mapping,
        qkv.stride(0), keys.stride(1), eps,
        heads, kv_heads, head_dim, keys.shape[-1], padded,
        triton.next_power_of_2(heads + kv_heads), has_norm,
    )  # fmt: skip
    return qkv[:, :heads]


def silu_and_mul(x: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    part = min(1024, triton.next_power_of_2(size))
    out = x.new_empty(len(x), size)
    silu_and_mul_kernel[(len(x), triton.cdiv(size, part))](out, x, size, part)
    return out


def recorder(model: Any, kv_cache: KVCache, limits: Limits) -> StepGraphs:
    from nanovllm.backends.cuda_graphs import StepGraphs  # chapter 11

    return StepGraphs(model, kv_cache, limits)


def experts() -> Any:
    from nanovllm.layers import triton_experts  # chapter 05

    return triton_experts


def grouped_product(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """One launch for all experts."""
    from nanovllm.layers.triton_products import multiply  # chapter 05

    rows = matrices.flatten(0, 1)
    return multiply(x, rows, rows, rows, 1, 16, pairs)  # neither scales nor zeros


def quantized_product(weight: Groups, num_experts: int | None) -> Quantized:
    from nanovllm.topics.quantization.triton_product import product_of  # chapter 21

    return product_of(weight, num_experts)


def delta_rule(*inputs: Any) -> Tensor:
    from nanovllm.layers.triton_delta import delta_layer  # chapter 23

    return delta_layer(*inputs)
