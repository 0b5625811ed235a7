"""Attention in PyTorch for a CPU: attention.py, fast. It runs on every device.

PyTorch's attention does not read block tables, so keys and values are first copied into the layout
that it expects. Sequences with one query are computed together, in groups of similar context
length; the others, prompts and chunks of them, one by one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.batch import Batch

GATHERED_BYTES = {  # per group
    "cpu": 4 * 2**20,  # the copy is still in the processor's caches when it is read
    "cuda": 256 * 2**20,  # a call costs more than that
}


class Part(NamedTuple):
    """Sequences that are computed together: a group of decodes, or one chunk of a prompt."""

    tokens: slice | Tensor  # their rows of q
    places: Any  # of their keys [sequences, num_kv_heads, keys], all padded to the longest
    mask: Tensor | None  # which keys each query may see; None: it is simply causal
    attend: Callable[..., Tensor]  # attend_group or attend_chunk


def group_by_context(seqs: list[int], contexts: list[int], max_keys: int) -> list[list[int]]:
    """Groups of sequences in which little is padding to the longest context.

    At most a third of the group, or only a few keys. No group has more than `max_keys` keys, unless
    it is a single sequence.
    """
    groups: list[list[int]] = []
    keys = 0  # of the last group
    padded = math.inf  # the same, each sequence padded to the longest context
    for b in sorted(seqs, key=lambda b: -contexts[b]):
        keys += contexts[b]
        if groups:
            padded = contexts[groups[-1][0]] * (len(groups[-1]) + 1)
        if padded > max_keys or padded - keys > max(512, keys // 2):
            groups.append([])
            keys = contexts[b]
        groups[-1].append(b)
    return [sorted(group) for group in groups]


class Layout:
    """The parts of a step. It holds no reference to the batch, which holds it."""

    groups = staticmethod(group_by_context)  # chapter 06 tries others

    def __init__(self, batch: Batch):
        self.starts = batch.cu_seqlens_q.tolist()
        self.contexts = batch.context_lens.tolist()
        counts = batch.cu_seqlens_q.diff().tolist()
        decodes = [b for b, num_queries in enumerate(counts) if num_queries == 1]
        chunks = [b for b, num_queries in enumerate(counts) if num_queries > 1]
        token_bytes = batch.kv_cache.tensor[:, 0, 0, 0].nbytes  # key and value in one layer
        max_bytes = GATHERED_BYTES[batch.slot_mapping.device.type]
        groups = self.groups(decodes, self.contexts, max_bytes // token_bytes)
        self.parts = [self.group(batch, seqs) for seqs in groups]
        self.parts += [self.chunk(batch, b) for b in chunks]

    def group(self, batch: Batch, seqs: list[int]) -> Part:
        """Decodes, padded to the longest context."""
        device = batch.slot_mapping.device
        longest = max(self.contexts[b] for b in seqs)
        position = torch.arange(longest, device=device)
        last = batch.context_lens[seqs].unsqueeze(1) - 1
        is_behind = (position > last)[:, None, None]
        mask = torch.where(is_behind, -torch.inf, 0.0)
        # past its end, a sequence reads its own last key: masked values are still multiplied by
        # zero, so a NaN left in another slot would spread
        places = self.places_of(batch, seqs, position.minimum(last))
        tokens = torch.tensor([self.starts[b] for b in seqs], device=device)
        return Part(tokens, places, mask, attend_group)

    def chunk(self, batch: Batch, b: int) -> Part:
        """A prompt, or the next part of one."""
        device = batch.slot_mapping.device
        tokens = slice(self.starts[b], self.starts[b + 1])
        num_queries = tokens.stop - tokens.start
        position = torch.arange(self.contexts[b], device=device)
        places = self.places_of(batch, [b], position)
        mask = None
        if num_queries < len(position):  # it also sees everything before it
            query = position[-num_queries:]
            mask = position <= query.unsqueeze(1)
        return Part(tokens, places, mask, attend_chunk)

    def places_of(self, batch: Batch, seqs: list[int], position: Tensor) -> Any:
        """The places of the keys of tokens at positions [keys], or [sequences, keys].

        Head by head: a place is a row of a layer's keys, seen as [slots * num_kv_heads, head_dim].
        """
        cache = batch.kv_cache
        first_block = batch.cu_blocks[seqs].unsqueeze(1)
        block_ids = batch.block_tables[first_block + position // cache.block_size]
        slots = cache.slots(block_ids, position % cache.block_size)
        heads = torch.arange(cache.num_kv_heads, device=slots.device).unsqueeze(1)
        return slots.unsqueeze(1) * cache.num_kv_heads + heads


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """Computes attention.paged_attention. Keys and values are never repeated per query head."""
    layout = batch.layout
    assert isinstance(layout, Layout), "batch.layout must be a Layout of this batch"
    cache = batch.kv_cache
    all_rows = [part.flatten(0, 2) for part in cache.layers[layer]]
    out = torch.empty_like(q)
    for tokens, places, mask, attend in layout.parts:
        flat = places.flatten()
        k, v = (
            cache.restored(rows.index_select(0, flat), q.dtype).view(*places.shape, -1)
            for rows in all_rows
        )
        out[tokens] = attend(q[tokens], k, v, mask, scale)
    return out


def attend_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The query heads of a KV head are the rows of one small matrix.

    q [sequences, num_heads, head_dim], k and v [sequences, num_kv_heads, keys, head_dim].
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    if q.dtype != torch.float32 or not k.is_contiguous():
        out = F.scaled_dot_product_attention(
            grouped,
            k,
            v,
            attn_mask=mask.to(q.dtype),
            scale=scale,
        )
        return out.reshape(q.shape)
    # half the time for one query; in half precision, a product would round the scores
    scores = grouped @ k.mT * scale + mask
    return (scores.softmax(-1) @ v).view(q.shape)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The query heads of a KV head are a batch that reads the same keys.

    q [tokens, num_heads, head_dim], k and v [1, num_kv_heads, keys, head_dim].
    """
    by_kv_head = q.unflatten(1, (k.shape[1], -1))
    grouped = by_kv_head.permute(1, 2, 0, 3)
    group = grouped.shape[1]
    k, v = (part.transpose(0, 1).expand(-1, group, -1, -1) for part in (k, v))  # not a copy
    out = F.scaled_dot_product_attention(
        grouped,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)
