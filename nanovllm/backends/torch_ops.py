"""The backend in plain PyTorch, for every device. See ops.py for what its functions do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape, KVCache
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.ops import Norm, Norms
from nanovllm.layers.sampler import Sampling
from nanovllm.layers.torch_attention import Layout
from nanovllm.layers.torch_attention import paged_attention as paged_attention  # of Ops

NAME = "torch"
COMPILES_AT_FIRST_USE = False
layout = Layout


def store_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    """Writes a step's keys and values into their slots (paper, section 5.1).

    k and v [T, num_kv_heads, head_dim].
    """
    for part, numbers in zip(batch.kv_cache.layers[layer], (k, v)):
        rows = batch.kv_cache.stored(numbers, part.dtype)
        part.flatten(0, 1).index_copy_(0, batch.slot_mapping, rows)


def copy_blocks(kv_cache: KVCache, copies: Tensor) -> None:
    sources, targets = copies.unbind(1)
    kv_cache.tensor[:, :, targets] = kv_cache.tensor[:, :, sources]


def add_and_norm(residual: Tensor, x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    residual.add_(x)
    weight = norm.weight  # in fp32, if the model's norms are
    normed = F.rms_norm(residual.to(weight.dtype), norm.normalized_shape, weight, norm.eps)
    return residual, normed.to(x.dtype)


def norm_and_rotate(
    qkv: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    cos_sin: Tensor,
    sizes: list[int],
) -> tuple[Tensor, ...]:
    """Splits qkv [T, num_heads + 2 * num_kv_heads, head_dim] into q, k and v.

    Each head of q and k is normalized, if the model does that, and rotated by the angles of cos_sin
    [T, head_dim], in fp32; the results have the dtype of qkv. `sizes` are the numbers of heads of
    q, k and v.
    """
    heads, kv_heads, _ = sizes
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q_weight = q_norm.weight.expand(heads, -1)
        k_weight = k_norm.weight.expand(kv_heads, -1)
        normed = F.rms_norm(qk, q_norm.normalized_shape, None, q_norm.eps)
        weight = torch.cat([q_weight, k_weight])
        qk = normed * weight

    # each number in the first half is rotated with one in the second
    x1, x2 = qk.float().chunk(2, -1)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first = (x1 * cos).addcmul_(x2, sin, value=-1)
    second = (x2 * cos).addcmul_(x1, sin)
    rotated = torch.cat([first, second], -1).to(qkv.dtype)
    q = rotated[:, :heads]
    k = rotated[:, heads:]
    return q, k, v


def in_two_steps(norm_and_rotate: Callable, store_kv: Callable) -> Callable:
    """The `rotate_and_store` of a backend that has a function for each of the two."""

    def rotate_and_store(
        qkv: Tensor, norms: Norms, cos_sin: Tensor, sizes: list[int], batch: Batch, layer: int
    ) -> Tensor:
        q, k, v = norm_and_rotate(qkv, *norms, cos_sin, sizes)
        store_kv(k, v, batch, layer)
        return q

    return rotate_and_store


rotate_and_store = in_two_steps(norm_and_rotate, store_kv)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    from nanovllm.layers.torch_sampler import sample  # chapter 08

    return sample(logits, sampling)


def cache_shape(shape: CacheShape, limits: Any, device: torch.device) -> CacheShape:
    return shape


def recorder(model: nn.Module, kv_cache: KVCache, limits: Any) -> None:
    """None: attention reads lengths on the CPU."""


def product_for(dtype: torch.dtype) -> Callable:
    return F.linear


def experts() -> Any:
    from nanovllm.layers import experts  # chapter 05

    return experts


def grouped_product(x: Tensor, matrices: Tensor, pairs: Any) -> Tensor:
    return experts().product(x, matrices, pairs)


def quantized_product(weight: Groups, num_experts: int | None) -> Quantized:
    from nanovllm.topics.quantization.experts import product_of  # chapter 21

    return product_of(weight, num_experts)


def delta_rule(*inputs: Any) -> Tensor:
    from nanovllm.topics.hybrid.delta import decode, delta_layer  # chapter 23

    return delta_layer(decode, *inputs)
