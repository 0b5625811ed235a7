"""The backend of vAttention: that of torch_ops, but attention reads keys and values without a block
table. Sequences in neighboring rows of the VirtualCache are a slice of it, so nothing is gathered.
See ops.py for the functions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.backends import torch_ops
from nanovllm.config import Limits
from nanovllm.layers import torch_attention
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.layers.torch_attention import group_by_context
from nanovllm.topics.vattention.cache import NO_ROW, VirtualCache, VirtualShape
from nanovllm.topics.vattention.memory import system_of

Groups = list[list[int]]  # of sequences
# a call of PyTorch's attention takes as long as it takes to read this much
CALL_BYTES = 2**18

NAME = "vattention"
COMPILES_AT_FIRST_USE = False
add_and_norm = torch_ops.add_and_norm
copy_blocks = torch_ops.copy_blocks
norm_and_rotate = torch_ops.norm_and_rotate
product = torch_ops.product
sample = torch_ops.sample
store_kv = torch_ops.store_kv
rotate_and_store = torch_ops.rotate_and_store
silu_and_mul = torch_ops.silu_and_mul
recorder = torch_ops.recorder
grouped_product = torch_ops.grouped_product
quantized_product = torch_ops.quantized_product
delta_rule = torch_ops.delta_rule


def cache_shape(shape: CacheShape, limits: Limits, device: torch.device) -> VirtualShape:
    return VirtualShape(shape, limits, system_of(device))


class Window(NamedTuple):
    """A part of the rows of a VirtualCache: the keys of several sequences."""

    rows: slice
    tokens: slice


class Layout(torch_attention.Layout):
    """The parts of a step: sequences with a row, and sequences without one, which are gathered as
    in torch_attention."""

    def __init__(self, batch: Batch):
        assert isinstance(batch.kv_cache, VirtualCache)
        self.rows = batch.kv_cache.show(batch)
        self.all_rows = batch.kv_cache.rows
        self.page_table = batch.kv_cache.page_table
        super().__init__(batch)

    def groups(self, decodes: list[int], contexts: list[int], max_keys: int) -> Groups:
        others = []
        seen = {}
        for b in decodes:
            if self.rows[b] == NO_ROW:
                others.append(b)
            else:
                seen[self.rows[b]] = b
        num_keys = max_keys * CALL_BYTES // self.max_bytes
        gathered = group_by_context(others, contexts, max_keys)
        return neighbors(seen, contexts, num_keys) + gathered

    def places_of(self, batch: Batch, seqs: list[int], position: Tensor) -> Any:
        first = self.rows[seqs[0]]
        if first == NO_ROW:
            # slots, because tokens may be padded: a head is no row of a tensor
            return super().places_of(batch, seqs, position)[:, 0] // batch.kv_cache.num_kv_heads
        rows = slice(first, first + len(seqs))
        num_tokens = position.shape[-1]
        self.page_table.fill(rows, num_tokens)
        return Window(rows, slice(num_tokens))


layout = Layout


def neighbors(seqs: dict[int, int], contexts: list[int], num_keys: int) -> Groups:
    """Groups of sequences, {row: sequence}, in consecutive rows. A sequence joins the group before
    it if this adds at most `num_keys` keys of padding."""
    groups: Groups = []
    last = longest = size = -2  # not next to any row
    for row, b in sorted(seqs.items()):
        new_longest = max(longest, contexts[b])
        added = size * (new_longest - longest) + new_longest - contexts[b]
        if row != last + 1 or added > num_keys:
            groups.append([])
            new_longest = contexts[b]
            size = 0
        groups[-1].append(b)
        size += 1
        last = row
        longest = new_longest
    return groups


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """See attention.paged_attention."""
    layout = batch.layout
    assert isinstance(layout, Layout)
    rows = layout.all_rows[layer]
    out = torch.empty_like(q)
    for tokens, places, mask, attend in layout.parts:
        if isinstance(places, Window):
            k, v = rows[:, places.rows, places.tokens].transpose(2, 3)
        else:
            layers = batch.kv_cache.layers[layer]
            k, v = (part.flatten(0, 1)[places].transpose(1, 2) for part in layers)
        out[tokens] = attend(q[tokens], k, v, mask, scale)
    return out
