"""The backend of vAttention: that of torch_ops, but keys and values are read where they are.

Sequences in neighboring rows of the VirtualCache are a slice of it: nothing is gathered, and no
block table is read. See ops.py for what the functions do.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanovllm.layers import torch_attention, torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.torch_attention import attend_chunk, attend_group, is_wasteful
from nanovllm.virtual_cache import NO_ROW, VirtualCache

CAN_BE_RECORDED = torch_ops.CAN_BE_RECORDED
add_and_norm = torch_ops.add_and_norm
copy_blocks = torch_ops.copy_blocks
norm_and_rotate = torch_ops.norm_and_rotate
sample = torch_ops.sample
silu_and_mul = torch_ops.silu_and_mul
store_kv = torch_ops.store_kv


@dataclass
class Window:
    """Where the keys of sequences are: in rows of a VirtualCache."""

    rows: slice | int
    tokens: slice

    def __len__(self) -> int:
        """Slots that must be gathered."""
        return 0


class Layout(torch_attention.Layout):
    """Of sequences in rows. Those that find none are gathered, as in torch_attention."""

    def __init__(self, batch: Batch):
        assert isinstance(batch.kv_cache, VirtualCache)
        self.rows = batch.kv_cache.show(batch)
        super().__init__(batch)
        self.seen = [part for part in self.parts if isinstance(part.slots, Window)]
        self.parts = [part for part in self.parts if isinstance(part.slots, Tensor)]

    def groups(self, decodes: list[int], max_keys: int) -> list[list[int]]:
        others = []
        seen = {}
        for b in decodes:
            if self.rows[b] == NO_ROW:
                others.append(b)
            else:
                seen[self.rows[b]] = b
        return super().groups(others, max_keys) + neighbors(seen, self.contexts)

    def slots_of(self, batch: Batch, seqs: list[int], position: Tensor) -> Any:
        first = self.rows[seqs[0]]
        if first == NO_ROW:
            return super().slots_of(batch, seqs, position)
        longest = slice(position.shape[-1])
        if position.dim() == 1:  # a chunk of one sequence
            return Window(first, longest)
        end = first + len(seqs)
        return Window(slice(first, end), longest)


layout = Layout


def neighbors(seqs: dict[int, int], contexts: list[int]) -> list[list[int]]:
    """Groups of sequences, {row: sequence}, in rows that follow each other, with little padding."""
    groups: list[list[int]] = []
    first = last = keys = longest = -2  # not next to any row
    for row, b in sorted(seqs.items()):
        longest = max(longest, contexts[b])
        keys += contexts[b]
        padding = (row + 1 - first) * longest - keys
        if row != last + 1 or is_wasteful(padding, keys):
            groups.append([])
            first = row
            keys = longest = contexts[b]
        groups[-1].append(b)
        last = row
    return groups


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """Like attention.paged_attention."""
    layout, cache = batch.layout, batch.kv_cache
    assert isinstance(layout, Layout) and isinstance(cache, VirtualCache)
    rows = cache.rows[layer]
    out = torch_attention.paged_attention(q, batch, layer, scale)
    for tokens, window, mask, is_group in layout.seen:
        kv = rows[:, window.rows, window.tokens]
        attend = attend_group if is_group else attend_chunk
        out[tokens] = attend(q[tokens], kv, mask, scale)
    # a mask hides what somebody has left behind the end of a sequence, but 0 times NaN is NaN
    if out.sum().isnan():
        attend_alone(q, out, rows, layout, scale)
    return out


def attend_alone(q: Tensor, out: Tensor, rows: Tensor, layout: Layout, scale: float) -> None:
    """Computes decodes again, one by one, each with exactly its own keys."""
    for b, row in enumerate(layout.rows):
        start, end = layout.starts[b : b + 2]
        if row != NO_ROW and end == start + 1:
            kv = rows[:, row : row + 1, : layout.contexts[b]]
            out[start:end] = attend_group(q[start:end], kv, None, scale)
