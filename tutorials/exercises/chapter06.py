"""Your answers to the exercises of chapter 06. To check them: python -m tutorials.check 06"""

import math

import torch


# --- 06.1 ---
def owner(
    slot: int, tables: list[list[int]], contexts: list[int], block_size: int
) -> tuple[int, int] | None:
    """Whose token is in this slot: the number of the sequence, and the position of the token in
    it. None if no token is there."""
    raise NotImplementedError


# --- 06.2 ---
def chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a chunk: q [m, heads, dim] are the last m queries of the context of k and v
    [n, kv_heads, dim]. Returns [m, heads, dim]. No key is copied for each head of the queries."""
    raise NotImplementedError


# --- 06.3 ---
def block_by_block(q: torch.Tensor, blocks) -> torch.Tensor:
    """Attention of one query q [dim], for one head. `blocks` yields the keys and values of one
    block after the other, each [some tokens, dim], always in the same memory."""
    raise NotImplementedError
