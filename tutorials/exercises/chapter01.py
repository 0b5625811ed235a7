"""Your answers to the exercises of chapter 01. To check them: python -m tutorials.check 01"""

import torch

from tutorials.ladder.rung2 import Sequence
from tutorials.ladder.rung3 import SEATS, step
from tutorials.ladder.rung5 import grow
from tutorials.ladder.rung6 import BUDGET


# --- 01.1 ---
def cells(prompts: list[int], answers: list[int]) -> int:
    """How many tokens rung 3 computes for one batch with prompts and answers of these lengths."""
    raise NotImplementedError


# --- 01.2 ---
def generate(model, requests, report):
    """As in rung 3, but a request that is done leaves the batch.

    Calls report(requests of the step, sizes, slots held, slots used) after each step.
    """
    raise NotImplementedError


# --- 01.3 ---
def plan(running, waiting, free):
    """As in rung 6, but prompts share the budget, 16 tokens at a time.

    Moves sequences from `waiting` to `running`, as far as SEATS and blocks last, and sets `new` of
    each sequence in `running`: how many of its tokens the step computes.
    """
    raise NotImplementedError
