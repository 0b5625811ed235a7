"""The backend in plain PyTorch, for every device. See ops.py for what its functions do."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.ops import Norm
from nanovllm.layers.sampler import sample as sample
from nanovllm.layers.torch_attention import paged_attention as paged_attention

CAN_BE_RECORDED = False  # attention reads lengths on the CPU


def store_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    for cache, new in zip(batch.kv_cache[:, layer], (k, v)):
        cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, new)


def copy_blocks(kv_cache: Tensor, copies: list[tuple[int, int]]) -> None:
    sources, targets = torch.tensor(copies, device=kv_cache.device).unbind(1)
    kv_cache[:, :, targets] = kv_cache[:, :, sources]


def add_and_norm(x: Tensor, residual: Tensor, norm: nn.RMSNorm) -> Tensor:
    return F.rms_norm(residual.add_(x), norm.normalized_shape, norm.weight, norm.eps)


def norm_and_rotate(
    qkv: Tensor, q_norm: Norm, k_norm: Norm, cos_sin: Tensor, sizes: list[int]
) -> tuple[Tensor, ...]:
    heads, kv_heads, _ = sizes
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        weights = torch.cat([q_norm.weight.expand(heads, -1), k_norm.weight.expand(kv_heads, -1)])
        qk = F.rms_norm(qk, q_norm.normalized_shape, None, q_norm.eps) * weights
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    x1, x2 = qk.float().chunk(
        2, dim=-1
    )  # each number in the first half is rotated with one in the second
    rotated = torch.cat(
        [(x1 * cos).addcmul_(x2, sin, value=-1), (x2 * cos).addcmul_(x1, sin)], dim=-1
    )
    return *rotated.to(qk.dtype).split([heads, kv_heads], dim=1), v


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
