"""Your answers to the exercises of chapter 07. To check them: python -m tutorials.check 07"""

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


def rows_to_check(counts: list[int], num_guesses: list[int]) -> list[int]:
    """Which rows of the batch go to the head. Sequence b computes counts[b] tokens in this step,
    and the last num_guesses[b] of them are guesses; it may have none. The rows of the first
    sequence come first."""
    raise NotImplementedError


def new_tokens(guesses: list[list[int]], likeliest: list[int]) -> list[list[int]]:
    """Which tokens each sequence gets: the guesses that are right, and one of the model's own.
    `likeliest` has the model's next token for each of the rows above."""
    raise NotImplementedError
