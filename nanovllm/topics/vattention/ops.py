"""The backends of vAttention. Attention reads keys and values without a block table: on a CPU,
PyTorch takes a slice of a row; on a GPU, Triton's kernels take a row for a block, the only one of
its sequence. All else is as in torch_ops and triton_ops. See ops.py for the functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.config import Limits
from nanovllm.layers import attention, torch_attention
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.topics.vattention.cache import VirtualCache, VirtualShape, in_rows
from nanovllm.topics.vattention.memory import system_of

if TYPE_CHECKING:
    from nanovllm.topics.vattention.graphs import RowGraphs


def cache_shape(shape: CacheShape, limits: Limits, device: torch.device) -> VirtualShape:
    return VirtualShape(shape, limits, system_of(device))


# --- on a CPU ---


class Layout(torch_attention.Layout):
    """The parts of a step: each sequence by itself, so that its keys are a slice of its row."""

    def __init__(self, batch: Batch):
        self.starts = batch.cu_seqlens_q.tolist()
        self.contexts = batch.context_lens.tolist()
        counts = batch.cu_seqlens_q.diff().tolist()
        self.parts = [
            self.group(batch, [b]) if num_queries == 1 else self.chunk(batch, b)
            for b, num_queries in enumerate(counts)
        ]

    def places_of(self, batch: Batch, seqs: list[int], position: Tensor) -> Any:
        return int(batch.block_tables[seqs[0]]), position.shape[-1]


def layout(batch: Batch) -> Batch:
    seen = in_rows(batch)
    seen.layout = None
    if seen.kv_cache is not batch.kv_cache:
        seen.layout = Layout(seen)
    return seen


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """See attention.paged_attention."""
    seen = batch.layout
    assert isinstance(seen, Batch)
    if seen.layout is None:
        return attention.paged_attention(q, seen, layer, scale)
    assert isinstance(seen.layout, Layout)
    keys, values = seen.kv_cache.layers[layer]
    out = torch.empty_like(q)
    for tokens, (row, length), mask, attend in seen.layout.parts:
        k = keys[row, :length].transpose(0, 1).unsqueeze(0)
        v = values[row, :length].transpose(0, 1).unsqueeze(0)
        out[tokens] = attend(q[tokens], k, v, mask, scale)
    return out


def on_cpu() -> SimpleNamespace:
    from nanovllm.backends import torch_ops

    own = {
        "NAME": "vattention",
        "cache_shape": cache_shape,
        "layout": layout,
        "paged_attention": paged_attention,
    }
    return SimpleNamespace(**vars(torch_ops) | own)


# --- on a GPU ---


def on_gpu() -> SimpleNamespace:
    from nanovllm.backends import torch_ops, triton_ops

    def layout(batch: Batch) -> Batch:
        seen = in_rows(batch)
        seen.layout = triton_ops.layout(seen)
        return seen

    def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
        seen: Any = batch.layout
        return triton_ops.paged_attention(q, seen, layer, scale)

    def recorder(model: Any, kv_cache: VirtualCache, limits: Limits) -> RowGraphs:
        from nanovllm.topics.vattention.graphs import RowGraphs

        return RowGraphs(model, kv_cache, limits)

    own = {
        "NAME": "vattention",
        "cache_shape": cache_shape,
        "layout": layout,
        "paged_attention": paged_attention,
        "recorder": recorder,
        "copy_blocks": torch_ops.copy_blocks,  # of blocks that are not contiguous
    }
    return SimpleNamespace(**vars(triton_ops) | own)
