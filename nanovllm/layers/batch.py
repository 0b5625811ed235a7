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

    kv_cache: torch.Tensor = field(
        repr=False
    )  # [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    slot_mapping: (
        torch.Tensor
    )  # [T] int64: block_id * block_size + offset, where a token's key and value go
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    context_lens: torch.Tensor  # [B] int32
    cu_blocks: torch.Tensor  # [B + 1] int32: the block table of sequence b is ...
    block_tables: (
        torch.Tensor
    )  # [all blocks] int32: ... block_tables[cu_blocks[b] : cu_blocks[b + 1]]
    num_decodes: int = (
        0  # so many of the first sequences have one query each; more may, at their own cost
    )
    max_context: int = 2**31 - 1  # a bound on context_lens that is known without asking the device
    layout: Any = None  # a backend's own view of the step, made by the first layer for all of them
