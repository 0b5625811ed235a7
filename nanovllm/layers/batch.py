"""Batch: what attention must know about a step, whichever backend computes it."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Batch:
    """T tokens of B sequences, each with blocks of the KV cache.

    The queries of sequence b are the tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1]. They are the last of its
    context_lens[b] tokens, whose keys are all in the cache once this step's have been stored.
    """

    kv_cache: torch.Tensor = field(repr=False)  # [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: torch.Tensor  # [T] int64: block_id * block_size + offset, where a token's key and value go
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    context_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32, padded with any block ids
    layout: Any = None  # a backend's own view of the step, made by the first layer for all layers
