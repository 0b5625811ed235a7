"""Schedule: the plan of one step, and what can be wrong with one. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanovllm.block_manager import Moves
from nanovllm.config import Limits
from nanovllm.options import shown
from nanovllm.sequence import Sequence, StepLogprobs

AnyScheduler = Any  # a scheduler.Scheduler; that module imports this one


class ScheduleError(RuntimeError):
    """A scheduler has planned a step that cannot be run. The message is one sentence for the
    scheduler's author."""

    def __init__(self, scheduler: object, method: str, problem: str):
        super().__init__(f"{type(scheduler).__name__}.{method}(): {problem}")


class Item(NamedTuple):
    """Tokens of a sequence to compute in a step: `num_tokens` from the one at `start` on. Those
    before it are in the cache."""

    seq: Sequence
    start: int
    num_tokens: int


@dataclass
class Schedule:
    """One step: what to compute, who gets a next token, and which blocks to move first. It means
    the same before, during and after the step."""

    tokens_left: int = 0  # while it is planned: how many more tokens may be added, ...
    prompt_tokens_left: int = 0  # ... and how many of them for sequences that lack more than one
    items: list[Item] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)  # those that get a next token
    sampled_from: list[int] = field(default_factory=list)  # after the last token of which item
    scored: list[Item] = field(default_factory=list)  # whose prompts' log-probabilities are wanted
    moves: Moves = field(default_factory=Moves)
    num_used_blocks: int = 0  # of the KV cache, while the step runs

    @property
    def num_tokens(self) -> int:
        return sum([num_tokens for _, _, num_tokens in self.items])

    def next_tokens(self, seq: Sequence, num_tokens: int) -> list[Item]:
        """As many of a sequence's next `num_tokens` tokens as the budgets allow, as an item, or
        none."""
        if num_tokens > 1:
            num_tokens = min(num_tokens, self.tokens_left, self.prompt_tokens_left)
        return [Item(seq, seq.num_computed_tokens, num_tokens)] if num_tokens > 0 else []

    def add(self, item: Item) -> None:
        """Its sequence must have blocks for it."""
        seq, start, num_tokens = item
        num_missing = len(seq.token_ids) - start
        if num_tokens == num_missing:
            # before a request forks, all its sequences draw from the logits of the first
            for member in (seq,) if seq.request.has_forked else seq.request.unfinished:
                self.sampled.append(member)
                self.sampled_from.append(len(self.items))
        self.items.append(item)
        self.tokens_left -= num_tokens
        if num_missing > 1:
            self.prompt_tokens_left -= num_tokens
            if seq.request.lacks_prompt_logprobs:
                self.scored.append(item)


def check_choice(
    scheduler: object, method: str, choice: object, candidates: Collection[object]
) -> None:
    """Raises ScheduleError if a policy has chosen something else than one of the candidates."""
    if choice not in candidates:
        problem = f"{shown(choice)} is not one of {shown(candidates)}"
        raise ScheduleError(scheduler, method, problem)


@dataclass
class CheckedScheduler:
    """A scheduler of whom little is believed: what it does wrong is a ScheduleError, which names
    the method. `check` looks at all items of its schedules; ours does without, it has its tests."""

    scheduler: AnyScheduler
    limits: Limits
    check: Callable[[Schedule, AnyScheduler, Limits], None] | None
    num_idle_steps: int = 0  # since somebody came, left or got a token ...
    num_idle_tokens: int = 0  # ... and the tokens that were computed in them

    def schedule(self, request_ids: Collection[str]) -> Schedule:
        """A step for the unfinished requests with these ids."""
        schedule = self.scheduler.schedule()
        if not isinstance(schedule, Schedule):
            problem = f"it returned {shown(schedule)}, and not a Schedule"
            raise ScheduleError(self.scheduler, "schedule", problem)
        if not schedule.items:
            self._explain_empty(request_ids)
        if self.check is not None:
            self.check(schedule, self.scheduler, self.limits)
        if schedule.sampled:
            self.forget_idle_steps()
        else:
            self._check_progress(schedule)
        return schedule

    def forget_idle_steps(self) -> None:
        self.num_idle_steps = 0
        self.num_idle_tokens = 0

    def update(
        self, schedule: Schedule, token_ids: list[int], logprobs: StepLogprobs = None
    ) -> None:
        self.scheduler.update(schedule, token_ids, logprobs)
        seq, start, _ = schedule.items[0]
        if seq.num_computed_tokens == start and seq in seq.request.unfinished:
            problem = "it did nothing: does it call super()?"
            raise ScheduleError(self.scheduler, "update", problem)

    def _explain_empty(self, request_ids: Collection[str]) -> None:
        queued = {request.request_id for request in self.scheduler.unfinished()}
        lost = set(request_ids) - queued
        why = "the policy serves nobody"
        if lost:
            why = f"neither waiting nor running: {shown(sorted(lost))}"
        who = f"there are unfinished requests: {shown([*request_ids])}"
        problem = f"it planned nothing, but {who}; {why}"
        raise ScheduleError(self.scheduler, "schedule", problem)

    def _check_progress(self, schedule: Schedule) -> None:
        """A scheduler may preempt so often that nobody ever gets a token: then far more tokens are
        computed than there are."""
        self.num_idle_steps += 1
        self.num_idle_tokens += schedule.num_tokens
        if self.num_idle_steps <= self.limits.max_model_len:
            return
        unfinished = self.scheduler.unfinished()
        num_held = sum(len(seq) for request in unfinished for seq in request.unfinished)
        if self.num_idle_tokens > 4 * num_held:
            problem = f"{self.num_idle_steps} steps without a new token"
            raise ScheduleError(self.scheduler, "schedule", problem)
