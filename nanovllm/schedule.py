"""Schedule: the plan of one step, and what can be wrong with one. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.block_manager import Moves
from nanovllm.options import shown
from nanovllm.sequence import Sequence, StepLogprobs


class ScheduleError(RuntimeError):
    """A user's scheduler has planned a step that cannot run. The error message names the class and
    the method."""

    def __init__(self, scheduler: object, method: str, problem: str):
        super().__init__(f"{type(scheduler).__name__}.{method}(): {problem}")


class Item(NamedTuple):
    """The tokens of a sequence to compute in a step: `num_tokens` tokens from `start` on. Earlier
    tokens are in the cache."""

    seq: Sequence
    start: int
    num_tokens: int


@dataclass
class Schedule:
    """The plan of one step: the tokens to compute, the sequences that get a token, the blocks to
    move first. The plan does not change when the sequences grow."""

    tokens_left: int = 0  # while it is planned: how many more tokens may be added, ...
    prompt_tokens_left: int = 0  # ... and how many of them for sequences that lack more than one
    items: list[Item] = field(default_factory=list)
    sampled: dict[Sequence, Sequence] = field(default_factory=dict)
    """The sequences that get a token in this step. The value is the sequence whose last row of
    logits is used: usually the same one; before a fork, the first sample; with draft tokens, the
    longest draft (chapter 22)."""
    scored: list[Item] = field(default_factory=list)
    """Items whose prompts' log-probabilities are wanted."""
    moves: Moves = field(default_factory=Moves)
    num_used_blocks: int = 0  # of the KV cache, while the step runs
    has_advanced: bool = False  # whether Scheduler.advance has counted its tokens as computed
    num_wasted: int = 0  # tokens that were drawn for sequences that had ended

    @property
    def num_tokens(self) -> int:
        return sum([num_tokens for _, _, num_tokens in self.items])

    def next_tokens(self, seq: Sequence, num_tokens: int) -> list[Item]:
        """Up to `num_tokens` of the sequence's next tokens, as far as the budgets allow; an empty
        list if there are none."""
        if num_tokens > 1:
            num_tokens = min(num_tokens, self.tokens_left, self.prompt_tokens_left)
        return [Item(seq, seq.num_computed_tokens, num_tokens)] if num_tokens > 0 else []

    def add(self, item: Item) -> None:
        """Adds an item. Its sequence must have the blocks already."""
        seq, start, num_tokens = item
        num_missing = len(seq.token_ids) - start
        if num_tokens == num_missing:
            for member in (seq,) if seq.request.has_forked else seq.request.unfinished:
                self.sampled[member] = seq
        self.items.append(item)
        self.tokens_left -= num_tokens
        if num_missing > 1:
            self.prompt_tokens_left -= num_tokens
            if seq.request.lacks_prompt_logprobs:
                self.scored.append(item)


Drawn = tuple[list[int], StepLogprobs]  # what a step brings: tokens, and their log-probabilities


def check_choice(
    scheduler: object, method: str, choice: object, candidates: Collection[object]
) -> None:
    """Raises ScheduleError if a policy's choice is not one of the candidates."""
    if choice not in candidates:
        raise ScheduleError(scheduler, method, f"{shown(choice)} is not one of {shown(candidates)}")


@dataclass
class Counts:
    """What an engine counts since its start."""

    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    wasted_tokens: int = 0  # sampled by a step that was launched before their sequence ended
    peak_blocks: int = 0  # the most KV blocks in use in a step
    seconds: float = 0.0  # of all steps

    def add(self, schedule: Schedule, seconds: float) -> None:
        """Counts a step that has been computed."""
        self.steps += 1
        self.seconds += seconds
        self.computed_tokens += schedule.num_tokens
        self.output_tokens += len(schedule.sampled)
        self.wasted_tokens += schedule.num_wasted
        self.peak_blocks = max(self.peak_blocks, schedule.num_used_blocks)
