"""Your answers to the exercises of chapter 10. To check them: python -m tutorials.check 10

Linux only. Without a GPU the kernels run in Triton's interpreter, where you may print.
"""

import math
import os

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl
from torch import Tensor


# --- 10.1 ---
def programs(chunks: list[tuple[int, int]]) -> list[tuple[int, int, int] | None]:
    """For each program of the grid, with tiles of 8 tokens and of 16 keys: a sequence, its first
    query in this sequence, and the number of tiles of keys that it reads. None if it has nothing to
    do. A chunk is a pair: its queries and its keys."""
    raise NotImplementedError


# --- 10.2 ---
def add_block(
    query: np.ndarray,  # [dim], float32, as the others
    keys: np.ndarray,  # [block_size, dim]
    values: np.ndarray,
    num_keys: int,  # the number of rows, from the first on, that belong to the sequence
    sums: np.ndarray,  # [2]: the maximum so far, and the total of the weights; -inf and 0 at first
    result: np.ndarray,  # [dim]: the weighted sum of the values so far
) -> None:
    """Adds the keys of one block to `sums` and `result`, in place. The weight of a key is
    2 ** (its score - maximum)."""
    raise NotImplementedError


# --- 10.3 ---
@triton.jit
def causal_kernel(
    out,  # [num_queries, DIM], float32, as the others
    queries,  # the last of the keys' tokens; already scaled
    keys,
    values,
    num_queries,
    num_keys,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program t: attention of TOKENS queries. Each sees its own key and all before it."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_queries
    position = num_keys - num_queries + token
    dim = tl.arange(0, DIM)
    q_at = token[:, None] * DIM + dim
    q = tl.load(queries + q_at, mask=is_token[:, None], other=0.0)
    first = num_keys - num_queries + tl.program_id(0) * TOKENS  # position of the first query
    end = tl.minimum(first + TOKENS, num_keys)  # the keys that the last one sees
    maximum = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    result = tl.zeros([TOKENS, DIM], tl.float32)
    for begin in range(0, end, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < end
        at = key[:, None] * DIM + dim
        k = tl.load(keys + at, mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        is_visible = key[None, :] <= position[:, None]
        scores = tl.where(is_visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        v = tl.load(values + at, mask=is_key[:, None], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        maximum = new_maximum
    tl.store(out + q_at, result / total[:, None], mask=is_token[:, None])


def windowed(out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, window: int) -> None:
    """Launches your kernel, with tiles of 16 queries and 16 keys. Each query sees `window` keys:
    its own, and the keys right before it. The rows have 16 numbers."""
    raise NotImplementedError
