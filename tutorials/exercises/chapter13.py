"""Your answers to the exercises of chapter 13. To check them: python -m tutorials.check 13"""

import math
from collections import Counter
from typing import NamedTuple

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence


# --- 13.1 ---
def blocks_at_most(prompt: int, answer: int, n: int, block_size: int) -> int:
    """The most blocks that n samples hold. `prompt` and `answer` are numbers of tokens; an answer
    has at least two. The last token of an answer is never computed."""
    raise NotImplementedError


# --- 13.2 ---
class Candidate(NamedTuple):
    """A beam with one more token."""

    parent: int  # the number of the beam
    token: int
    logprob: float  # of the whole: the nearer to 0, the likelier


def diverse(candidates: list[Candidate], width: int, gamma: float) -> list[Candidate]:
    """The `width` candidates with the best ranks, best first. No candidate changes. Of the children of one parent, the
    likeliest is ranked as it is, the second as if its logprob were lower by gamma, the third by 2 *
    gamma, and so on. The candidates come in any order."""
    raise NotImplementedError


# --- 13.3 ---
def blocks_needed(manager: BlockManager, seqs: list[Sequence]) -> int:
    """How many free blocks a step takes in which each of these sequences writes one token, copies
    included. `seq.num_computed_tokens` are written already. A block table may end with blocks for
    later tokens. Changes nothing."""
    raise NotImplementedError
