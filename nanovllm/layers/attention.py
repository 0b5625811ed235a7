"""Attention over the paged KV cache: a ragged batch in, whatever mixture of prompts, chunks and decodes it is.

This is the PyTorch reference. It runs on every device and is what the Triton kernels (kernels.py) are tested against.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


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
        similar = defaultdict(list)  # contexts within a factor of two, in blocks: at most half of a group is padding
        self.chunks = []  # (first token, last token + 1, context length, blocks, mask)
        for b, context in enumerate(contexts):
            start, end, num_blocks = starts[b], starts[b + 1], -(-context // block_size)
            if end - start == 1:
                similar[(num_blocks - 1).bit_length()].append(b)
            elif end - start > 1:
                mask = None  # a whole prompt is simply causal; a chunk sees everything before it, too
                if end - start < context:
                    mask = torch.ones(end - start, context, dtype=torch.bool, device=device).tril_(
                        context - (end - start)
                    )
                self.chunks.append((start, end, context, batch.block_tables[b, :num_blocks], mask))
        self.groups = []  # (tokens, slots, mask)
        for group in similar.values():
            rows = torch.tensor([starts[b] for b in group], device=device)
            last = batch.context_lens[group].unsqueeze(1) - 1
            position = torch.arange(max(contexts[b] for b in group), device=device)
            mask = torch.zeros(len(group), len(position), dtype=dtype, device=device)
            mask.masked_fill_(position > last, -torch.inf)
            # past its end a sequence reads its own last slot: what is masked is still multiplied by zero, and NaN
            # left behind by somebody else would come through
            position = position.minimum(last)
            block_ids = batch.block_tables[group].gather(1, position // block_size)
            self.groups.append((rows, (block_ids * block_size + position % block_size).flatten(), mask[:, None, None]))


def kernels():
    from nanovllm.layers import kernels  # not at the top: there is no Triton on macOS and Windows

    return kernels


def store_kv(k: torch.Tensor, v: torch.Tensor, batch: Batch, layer: int) -> None:
    """Writes this step's keys and values [T, num_kv_heads, head_dim] into their slots (paper, section 5.1)."""
    if batch.use_triton:
        return kernels().store_kv(k, v, batch, layer)
    for cache, new in zip(batch.kv_cache[:, layer], (k, v)):
        cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, new)


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
    for rows, slots, mask in plan.groups:  # the query heads of a KV head are the rows of one small matrix
        shape = (len(rows), -1, num_kv_heads, head_dim)
        k, v = (c.view(-1, num_kv_heads * head_dim).index_select(0, slots).view(shape).transpose(1, 2) for c in caches)
        grouped = q[rows].view(len(rows), num_kv_heads, -1, head_dim)
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        out[rows] = o.reshape(-1, num_heads, head_dim)
    for start, end, context, blocks, mask in plan.chunks:
        shape = (-1, num_kv_heads, head_dim)
        k, v = (cache.index_select(0, blocks).view(shape)[:context].transpose(0, 1) for cache in caches)
        grouped = q[start:end].view(end - start, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        k, v = (x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v))  # stride 0, not a copy
        o = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        out[start:end] = o.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim)
    return out
