"""Attention over the paged KV cache, written as plainly as possible. Every backend is tested against this."""

import torch

from nanovllm.layers.batch import Batch


def paged_attention(q: torch.Tensor, batch: Batch, layer: int, scale: float) -> torch.Tensor:
    """Causal attention of q [T, num_heads, head_dim] over each sequence's context in the cache. Returns the same shape.

    Query head h reads KV head h // (num_heads / num_kv_heads).
    """
    out, starts, blocks = torch.zeros_like(q), batch.cu_seqlens_q.tolist(), batch.cu_blocks.tolist()
    block_size = batch.kv_cache.shape[3]
    for b, context in enumerate(batch.context_lens.tolist()):
        tokens = slice(starts[b], starts[b + 1])
        position = torch.arange(context, device=q.device)
        block_ids = batch.block_tables[blocks[b] + position // block_size].long()
        k, v = batch.kv_cache[
            :, layer, block_ids, position % block_size
        ]  # [context, num_kv_heads, head_dim] each
        group = q.shape[1] // k.shape[1]  # query heads that read the same KV head
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), k.float()) * scale
        is_future = position > position[starts[b] - starts[b + 1] :, None]
        weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
    return out
