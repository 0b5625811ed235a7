"""Attention over the paged KV cache: a ragged batch in, whatever mixture of prompts, chunks and decodes it is.

This is the PyTorch reference. It runs on every device and is what the Triton kernels (kernels.py) are tested against.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

GATHERED_BYTES = 4 * 2**20  # of a group: what it copies should be read again while a processor's caches still have it


@dataclass
class Batch:
    """What attention must know of a step with T tokens of B sequences.

    The queries of sequence b are the tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1]. They are the last of
    the context_lens[b] tokens whose keys are in the cache once this step's have been stored.
    """

    kv_cache: torch.Tensor  # [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset, where a token's key and value go
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    context_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32, padded with any block ids
    use_triton: bool = False  # kernels.py in place of this file

    @cached_property
    def plan(self) -> "Plan":
        """The reference's own view of the batch, made once per step and used by every layer."""
        return Plan(self)


class Plan:
    """Sequences with one query are attended to together, in groups of similar context; the others one by one."""

    def __init__(self, batch: Batch):
        starts, contexts = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
        block_size, dtype, device = batch.kv_cache.shape[3], batch.kv_cache.dtype, batch.kv_cache.device
        counts = [end - start for start, end in pairwise(starts)]
        self.groups = []  # (tokens, slots, mask)
        key_bytes = 2 * batch.kv_cache.shape[4:].numel() * dtype.itemsize
        decodes = [b for b, count in enumerate(counts) if count == 1]
        for group in similar(decodes, contexts, most_keys=GATHERED_BYTES // key_bytes):
            tokens = torch.tensor([starts[b] for b in group], device=device)
            last = batch.context_lens[group].unsqueeze(1) - 1
            position = torch.arange(max(contexts[b] for b in group), device=device)
            mask = torch.zeros(len(group), len(position), dtype=dtype, device=device)
            mask.masked_fill_(position > last, -torch.inf)
            # past its end a sequence reads its own last slot: what is masked is still multiplied by zero, and NaN
            # left behind by somebody else would come through
            position = position.minimum(last)
            block_ids = batch.block_tables[group].gather(1, position // block_size)
            slots = (block_ids * block_size + position % block_size).flatten()
            if tokens[-1] - tokens[0] == len(group) - 1:  # neighbors: a view of them will do
                tokens = slice(starts[group[0]], starts[group[-1]] + 1)
            self.groups.append((tokens, slots, mask[:, None, None]))
        self.chunks = []  # (tokens, slots, mask)
        for b, count in enumerate(counts):
            if count > 1:
                position, mask = torch.arange(contexts[b], device=device), None
                if count < contexts[b]:  # a whole prompt is simply causal; a chunk sees everything before it, too
                    mask = position <= position[-count:].unsqueeze(1)
                slots = batch.block_tables[b, position // block_size] * block_size + position % block_size
                self.chunks.append((slice(starts[b], starts[b + 1]), slots, mask))
        most = max(len(slots) for _, slots, _ in self.groups + self.chunks)
        self.gathered = batch.kv_cache.new_empty(2, most, batch.kv_cache.shape[4:].numel())

    def gather(self, caches: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Keys and values of `slots` [2, slots, num_kv_heads * head_dim], in memory that the next call uses again:
        to get new memory from the system takes longer than the copy."""
        out = self.gathered[:, : len(slots)]
        for cache, place in zip(caches.flatten(3).flatten(1, 2), out):
            torch.index_select(cache, 0, slots, out=place)
        return out


def similar(rows: list[int], contexts: list[int], most_keys: int) -> list[list[int]]:
    """Groups of rows, such that padding to the longest context is at most a third of a group, or a few keys in all,
    and no group has more than `most_keys`, unless it is a single row."""
    groups, padding, keys = [], 0, 0
    for row in sorted(rows, key=lambda row: -contexts[row]):
        longest = contexts[groups[-1][0]] if groups else contexts[row]
        padding, keys = padding + longest - contexts[row], keys + contexts[row]
        if not groups or padding > max(512, keys // 2) or padding + keys > most_keys:
            groups.append([])
            padding, keys = 0, contexts[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def kernels():
    from nanovllm.layers import kernels  # not at the top: there is no Triton on macOS and Windows

    return kernels


def store_kv(k: torch.Tensor, v: torch.Tensor, batch: Batch, layer: int) -> None:
    """Writes this step's keys and values [T, num_kv_heads, head_dim] into their slots (paper, section 5.1)."""
    if batch.use_triton:
        return kernels().store_kv(k, v, batch, layer)
    for cache, new in zip(batch.kv_cache[:, layer], (k, v)):
        cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, new)


def copy_blocks(kv_cache: torch.Tensor, copies: list[tuple[int, int]], use_triton: bool = False) -> None:
    """Copies [(from block, to block)], keys and values of all layers at once (paper, section 5.1). No block is both."""
    pairs = torch.tensor(copies, device=kv_cache.device)
    if use_triton:
        return kernels().copy_blocks(kv_cache, pairs)
    sources, targets = pairs.unbind(1)
    kv_cache[:, :, targets] = kv_cache[:, :, sources]


def paged_attention(q: torch.Tensor, batch: Batch, layer: int, scale: float) -> torch.Tensor:
    """Causal attention of q [T, num_heads, head_dim] over each sequence's cached context; the same shape out.

    Query head h reads KV head h // (num_heads / num_kv_heads). Keys and values are read through the block
    table and never repeated per query head.
    """
    if batch.use_triton:
        return kernels().paged_attention(q, batch, layer, scale)
    num_heads, head_dim = q.shape[1:]
    plan, caches = batch.plan, batch.kv_cache[:, layer]
    num_kv_heads = caches.shape[3]
    out = torch.empty_like(q)
    for tokens, slots, mask in plan.groups:  # the query heads of a KV head are the rows of one small matrix
        kv = plan.gather(caches, slots).view(2, mask.shape[0], -1, num_kv_heads, head_dim)
        k, v = kv.transpose(2, 3)
        grouped = q[tokens].view(len(k), num_kv_heads, -1, head_dim)
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        out[tokens] = o.reshape(-1, num_heads, head_dim)
    for tokens, slots, mask in plan.chunks:
        k, v = plan.gather(caches, slots).view(2, -1, num_kv_heads, head_dim).transpose(1, 2)
        grouped = q[tokens].view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
        k, v = (x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v))  # stride 0, not a copy
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        out[tokens] = o.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)
    return out
