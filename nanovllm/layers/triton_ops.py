"""The backend in Triton: each kernel does in one pass over memory what PyTorch does in several.

See ops.py for what the functions do; they are tested against torch_ops.py. Sums are in fp32; a 16-bit result is rounded
once, at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nanovllm.layers import sampler
from nanovllm.layers.ops import Norm
from nanovllm.layers.sampler import Sampling
from nanovllm.layers.triton_attention import copy_blocks as copy_blocks
from nanovllm.layers.triton_attention import paged_attention as paged_attention
from nanovllm.layers.triton_attention import store_kv as store_kv

CAN_BE_RECORDED = True


@triton.jit
def add_and_norm_kernel(out, x, residual, weight, eps, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Program t: residual[t] += x[t], then its RMSNorm."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, PADDED)
    i = tl.arange(0, PADDED)
    dtype = out.dtype.element_ty
    added = tl.load(x + at, mask=i < SIZE, other=0.0).to(tl.float32)
    added = (added + tl.load(residual + at, mask=i < SIZE, other=0.0).to(tl.float32)).to(dtype)
    tl.store(residual + at, added, mask=i < SIZE)
    added = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(added * added, 0) / SIZE + eps)
    w = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + at, (added * scale * w).to(dtype), mask=i < SIZE)


@triton.jit
def norm_and_rotate_kernel(
    qk, q_weight, k_weight, cos_sin, stride, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (t, head), query heads first, then key heads: RMSNorm if there is one, and rotation, in place."""
    t, head = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, PADDED)
    at = qk + t.to(tl.int64) * stride + head * HEAD_DIM + i
    x1 = tl.load(at, mask=i < HALF, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 0) / HEAD_DIM + eps)
        weight = q_weight
        if head >= HEADS:
            weight = k_weight
        x1 = x1 * scale * tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)
        x2 = x2 * scale * tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + t * HEAD_DIM + i, mask=i < HALF, other=0.0)
    sin = tl.load(cos_sin + t * HEAD_DIM + HALF + i, mask=i < HALF, other=0.0)
    tl.store(at, (x1 * cos - x2 * sin).to(qk.dtype.element_ty), mask=i < HALF)
    tl.store(at + HALF, (x2 * cos + x1 * sin).to(qk.dtype.element_ty), mask=i < HALF)


@triton.jit
def silu_and_mul_kernel(out, x, SIZE: tl.constexpr, PART: tl.constexpr):
    """Program (t, part): silu(gate) * up for PART of the SIZE numbers."""
    i = tl.program_id(1) * PART + tl.arange(0, PART)
    t = tl.program_id(0).to(tl.int64)
    gate = tl.load(x + 2 * t * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * t + 1) * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(
        out + t * SIZE + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=i < SIZE
    )


@triton.jit
def mixed(x):
    """As in sampler.uniform, but with uint64, the natural type for it."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def sample_kernel(
    out, logits, temperature, seed, position, VOCAB: tl.constexpr, TILE: tl.constexpr
):
    """Program b draws the token of row b: the maximum and the sum in one pass over the row, the token in a second."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    t = tl.load(temperature + b)
    scale = 1.4426950408889634 / tl.where(t == 0, 1.0, t)  # exp(x) is exp2(x / ln 2)
    maximum, total, likeliest = float("-inf"), 0.0, 0
    for begin in range(0, VOCAB, TILE):
        x = tl.load(logits + b * VOCAB + begin + i, mask=begin + i < VOCAB, other=float("-inf")).to(
            tl.float32
        )
        here = tl.max(x, 0)
        likeliest = tl.where(here > maximum, begin + tl.argmax(x, 0), likeliest)
        larger = tl.maximum(here, maximum)
        total = total * tl.exp2((maximum - larger) * scale) + tl.sum(
            tl.exp2((x - larger) * scale), 0
        )
        maximum = larger
    chosen = likeliest
    if t > 0:
        steps = tl.load(position + b).to(tl.uint64) * 0x9E3779B97F4A7C15
        bits = mixed(mixed(tl.load(seed + b).to(tl.uint64)) + steps) >> 41
        threshold = bits.to(tl.int32).to(tl.float32) / 8388608 * total  # 23 bits
        passed, count = 0.0, 0
        for begin in range(0, VOCAB, TILE):
            x = tl.load(
                logits + b * VOCAB + begin + i, mask=begin + i < VOCAB, other=float("-inf")
            ).to(tl.float32)
            weights = tl.exp2((x - maximum) * scale)
            count += tl.sum(
                ((passed + tl.cumsum(weights, 0) <= threshold) & (begin + i < VOCAB)).to(tl.int32),
                0,
            )
            passed += tl.sum(weights, 0)
        there = tl.load(logits + b * VOCAB + tl.minimum(count, VOCAB - 1)).to(tl.float32)
        weight = tl.exp2((there - maximum) * scale)
        chosen = tl.where(
            (count < VOCAB) & (weight > 0), count, likeliest
        )  # rounding may lead to a token of weight 0
    tl.store(out + b, chosen)


def add_and_norm(x: Tensor, residual: Tensor, norm: nn.RMSNorm) -> Tensor:
    out, size = torch.empty_like(x), x.shape[-1]
    padded = triton.next_power_of_2(size)
    add_and_norm_kernel[(len(x),)](
        out, x, residual, norm.weight, norm.eps, size, padded, num_warps=8
    )
    return out


def norm_and_rotate(
    qkv: Tensor, q_norm: Norm, k_norm: Norm, cos_sin: Tensor, sizes: list[int]
) -> tuple[Tensor, ...]:
    """In place: q, k and v are views of qkv."""
    (heads, kv_heads, _), head_dim = sizes, qkv.shape[-1]
    weights, eps, has_norm = (qkv, qkv), 0.0, False
    if q_norm is not None and k_norm is not None:
        weights, eps, has_norm = (q_norm.weight, k_norm.weight), q_norm.eps or 0.0, True
    norm_and_rotate_kernel[(len(qkv), heads + kv_heads)](
        qkv, *weights, cos_sin, qkv.stride(0), eps,
        heads, head_dim, triton.next_power_of_2(head_dim // 2), has_norm, num_warps=1,
    )  # fmt: skip
    return qkv.split(sizes, dim=1)


def silu_and_mul(x: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    out, part = x.new_empty(len(x), size), min(1024, triton.next_power_of_2(size))
    silu_and_mul_kernel[(len(x), triton.cdiv(size, part))](out, x, size, part)
    return out


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Leaves filters to PyTorch."""
    if not (sampling.min_p is sampling.top_k is sampling.top_p is None):
        return sampler.sample(logits, sampling)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tile = min(8192, triton.next_power_of_2(logits.shape[1]))
    options = sampling.temperature, sampling.seed, sampling.position
    sample_kernel[(len(logits),)](out, logits, *options, logits.shape[1], tile, num_warps=8)
    return out
