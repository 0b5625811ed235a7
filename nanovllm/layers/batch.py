"""Batch: what attention reads about a step, on every backend."""

from dataclasses import dataclass

from torch import Tensor

from nanovllm.layers.kv_cache import KVCache


@dataclass
class Batch:
    """T tokens of B sequences, each with blocks of the KV cache.

    The queries of sequence b are the tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1]. They are the
    last of its context_lens[b] tokens, whose keys are all in the cache once this step's have been
    stored.
    """

    kv_cache: KVCache
    slot_mapping: Tensor  # [T] int64: the slot for a token's key and value, see KVCache.slots
    cu_seqlens_q: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32
    cu_blocks: Tensor  # [B + 1] int32: the block table of sequence b is ...
    block_tables: Tensor  # [all blocks] int32: ... block_tables[cu_blocks[b] : cu_blocks[b + 1]]
    num_decodes: int = 0  # the first sequences have one query each; others may, too
    layout: object = None  # what the backend's `layout` made of all this, before the model runs
    state_slots: Tensor | None = None  # [B] int64, see topics/hybrid
