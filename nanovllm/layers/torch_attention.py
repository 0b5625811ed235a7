"""Attention in PyTorch for a CPU: attention.py, fast. It runs on every device.

PyTorch's attention does not read block tables, so keys and values are first copied into the layout that it expects.
Sequences with one query are computed together, in groups of similar context length; the others, prompts and chunks of
them, one by one.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from nanovllm.layers.batch import Batch

GATHERED_BYTES = (
    4 * 2**20
)  # per group, so that the copy is still in the processor's caches when it is read


Part = tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor | None, bool]


class Layout:
    """Where each group or chunk of a step has its tokens and its slots, and which keys each query may see. It holds no
    reference to the batch, which holds it: a cycle would keep `gathered` alive until Python collects garbage."""

    def __init__(self, batch: Batch):
        self.starts, self.contexts = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
        counts = [end - start for start, end in pairwise(self.starts)]
        width = batch.kv_cache.shape[4:].numel()  # numbers per key
        most_keys = GATHERED_BYTES // (2 * width * batch.kv_cache.dtype.itemsize)
        decodes = [b for b, count in enumerate(counts) if count == 1]
        groups = group_by_context(decodes, self.contexts, most_keys)
        self.parts = [self.part(batch, seqs, 1) for seqs in groups]
        self.parts += [self.part(batch, [b], count) for b, count in enumerate(counts) if count > 1]
        self.gathered = batch.kv_cache.new_empty(
            2, max(len(slots) for _, slots, _, _ in self.parts), width
        )

    def part(self, batch: Batch, seqs: list[int], count: int) -> Part:
        """(tokens, slots, mask, is_group) for sequences with `count` queries each, padded to the longest."""
        starts, cache = [self.starts[b] for b in seqs], batch.kv_cache
        last = batch.context_lens[seqs].unsqueeze(1) - 1
        position, mask = (
            torch.arange(max(self.contexts[b] for b in seqs), device=cache.device),
            None,
        )
        if count == 1:
            mask = torch.zeros(len(seqs), len(position), dtype=cache.dtype, device=cache.device)
            mask = mask.masked_fill_(position > last, -torch.inf)[:, None, None]
        elif count < len(
            position
        ):  # a chunk also sees everything before it; a whole prompt is simply causal
            mask = position <= position[-count:].unsqueeze(1)
        # past its end, a sequence reads its own last slot: masked values are still multiplied by zero, so a NaN left in
        # another slot would spread
        position = position.minimum(last)
        block_ids = batch.block_tables[
            batch.cu_blocks[seqs].unsqueeze(1) + position // cache.shape[3]
        ].long()
        slots = (block_ids * cache.shape[3] + position % cache.shape[3]).flatten()
        if starts[-1] - starts[0] == len(seqs) - 1:  # neighbors: a view is enough
            return slice(starts[0], starts[-1] + count), slots, mask, count == 1
        return torch.tensor(starts, device=cache.device), slots, mask, True


def group_by_context(seqs: list[int], contexts: list[int], most_keys: int) -> list[list[int]]:
    """Groups of sequences in which padding to the longest context is at most a third of the group, or only a few keys.
    No group has more than `most_keys` keys, unless it is a single sequence."""
    groups: list[list[int]] = []
    padding = keys = 0
    for b in sorted(seqs, key=lambda b: -contexts[b]):
        longest = contexts[groups[-1][0]] if groups else contexts[b]
        padding, keys = padding + longest - contexts[b], keys + contexts[b]
        if not groups or padding > max(512, keys // 2) or padding + keys > most_keys:
            groups.append([])
            padding, keys = 0, contexts[b]
        groups[-1].append(b)
    return [sorted(group) for group in groups]


def paged_attention(q: torch.Tensor, batch: Batch, layer: int, scale: float) -> torch.Tensor:
    """Like attention.paged_attention. Keys and values are never repeated per query head."""
    num_heads, head_dim = q.shape[1:]
    if batch.layout is None:
        batch.layout = Layout(batch)
    layout, caches = batch.layout, batch.kv_cache[:, layer]
    num_kv_heads = caches.shape[3]
    out = torch.empty_like(q)
    for tokens, slots, mask, is_group in layout.parts:
        gathered = layout.gathered[
            :, : len(slots)
        ]  # reused, since getting new memory takes longer than the copy
        for cache, copied in zip(caches.flatten(3).flatten(1, 2), gathered):
            torch.index_select(cache, 0, slots, out=copied)
        if is_group:  # the query heads of a KV head are the rows of one small matrix
            k, v = gathered.view(2, len(mask), -1, num_kv_heads, head_dim).transpose(2, 3)
            grouped = q[tokens].view(len(mask), num_kv_heads, -1, head_dim)
            o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            out[tokens] = o.reshape(-1, num_heads, head_dim)
        else:
            k, v = gathered.view(2, -1, num_kv_heads, head_dim).transpose(1, 2)
            grouped = (
                q[tokens]
                .view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
                .permute(1, 2, 0, 3)
            )
            k, v = (
                x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v)
            )  # stride 0, not a copy
            o = F.scaled_dot_product_attention(
                grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
            )
            out[tokens] = o.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)
    return out
