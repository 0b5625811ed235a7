"""Attention over the paged KV cache, written as plainly as possible.

Every backend is tested against this.
"""

import torch
from torch import Tensor

from nanovllm.layers.batch import Batch


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """Causal attention of q [T, num_heads, head_dim] over each sequence's context in the cache.

    Returns the same shape and dtype; the sums are in fp32. Query head h reads KV head
    h // (num_heads / num_kv_heads). Slots behind a context may hold NaN.
    """
    cache = batch.kv_cache
    keys, values = cache.layers[layer]
    block_size = cache.block_size
    group = q.shape[1] // cache.num_kv_heads  # query heads that read the same KV head
    starts = batch.cu_seqlens_q.tolist()
    first_blocks = batch.cu_blocks.tolist()
    out = torch.zeros_like(q)
    for b, context in enumerate(batch.context_lens.tolist()):
        tokens = slice(starts[b], starts[b + 1])
        num_queries = starts[b + 1] - starts[b]
        position = torch.arange(context, device=q.device)
        index = first_blocks[b] + position // block_size
        block_ids = batch.block_tables[index].long()
        offset = position % block_size
        # [context, num_kv_heads, head_dim]
        k = cache.restored(keys[block_ids, offset], torch.float32)
        v = cache.restored(values[block_ids, offset], torch.float32)
        k = k.repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
        v = v.repeat_interleave(group, dim=1)
        queries = q[tokens].float()
        scores = torch.einsum("qhd,khd->hqk", queries, k)
        is_future = position > position[-num_queries:, None]
        scores = (scores * scale).masked_fill(is_future, -torch.inf)
        weights = scores.softmax(-1)
        result = torch.einsum("hqk,khd->qhd", weights, v)
        out[tokens] = result.to(q.dtype)
    return out
