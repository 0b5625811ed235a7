"""Your answers to the exercises of chapter 07. To check them: python -m tutorials.check 07"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


# --- 07.1 ---
def arrays(
    token_ids: list[int], start: int, num_tokens: int, block_table: list[int], block_size: int
) -> tuple[list[int], list[int], int, bool]:
    """What a step needs that computes `num_tokens` tokens of a sequence from `start` on: their
    positions, their slots, the context after the step, and whether a row is sampled."""
    raise NotImplementedError


# --- 07.2 ---
def rectangle(block_tables: Tensor, cu_blocks: Tensor) -> Tensor:
    """The block tables of a step as a rectangle, with a row for each sequence and -1 where a table
    is shorter than the longest. Both arrays are as in the step: [all blocks] and [B + 1], int32. So
    is the rectangle."""
    raise NotImplementedError


# --- 07.3 ---
class Tables:
    """Block tables that stay from step to step."""

    def __init__(self, rows: int, columns: int):
        """At most `rows` sequences per step, and at most `columns` blocks per table."""
        raise NotImplementedError

    def step(self, tables: Mapping[str, Sequence[int]]) -> Tensor:
        """The block tables of a step by the names of its sequences, as rows of a rectangle, int32,
        [sequences, columns], in the order of `tables`, with -1 behind the end of each. Of a table,
        read its length, a block, or a slice. A row of a sequence that has left is free again."""
        raise NotImplementedError
