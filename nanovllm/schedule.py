"""Schedule: the plan of one step, and what can be wrong with one. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from nanovllm.block_manager import BlockManager, Moves
from nanovllm.config import Limits
from nanovllm.options import shown
from nanovllm.sequence import Request, Sequence, StepLogprobs

AnyScheduler = Any  # a scheduler.Scheduler; that module imports this one
Wrong = Callable[[str], "ScheduleError"]


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

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass
class Schedule:
    """One step: what to compute, who gets a next token, and which blocks to move first. It means
    the same before, during and after the step."""

    tokens_left: int = 0  # while it is planned: how many more tokens may be added, ...
    prompt_tokens_left: int = 0  # ... and how many of them for sequences that lack more than one
    items: list[Item] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)  # those that get a next token
    sampled_from: list[int] = field(default_factory=list)  # after the last token of which item
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


@dataclass
class CheckedScheduler:
    """A scheduler of whom nothing is believed: what it does wrong is a ScheduleError, which names
    the method. `checks_items=False` trusts that its steps can be run: ours has its tests."""

    scheduler: AnyScheduler
    limits: Limits
    checks_items: bool = True
    num_idle_steps: int = 0  # since somebody has got a token ...
    num_idle_tokens: int = 0  # ... and the tokens that were computed in them

    def schedule(self, request_ids: Collection[str]) -> Schedule:
        """A step for the unfinished requests with these ids."""
        schedule = self.scheduler.schedule()
        if not isinstance(schedule, Schedule):
            problem = f"it returned {shown(schedule)}, and not a Schedule"
            raise ScheduleError(self.scheduler, "schedule", problem)
        if not schedule.items:
            self._explain_empty(request_ids)
        if self.checks_items:
            check_schedule(schedule, self.scheduler, self.limits)
        self._check_progress(schedule)
        return schedule

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
        """A scheduler may preempt so often that nobody ever gets a token: then more tokens are
        computed than those who run have."""
        if schedule.sampled:
            self.num_idle_steps = 0
            self.num_idle_tokens = 0
            return
        self.num_idle_steps += 1
        self.num_idle_tokens += schedule.num_tokens
        running = self.scheduler.running
        num_held = sum(len(seq) for request in running for seq in request.unfinished)
        if self.num_idle_steps > self.limits.max_model_len and self.num_idle_tokens > num_held:
            problem = f"{self.num_idle_steps} steps without a new token"
            raise ScheduleError(self.scheduler, "schedule", problem)


# --- second reading: what can be wrong with the items of a schedule ---


def check_choice(
    scheduler: object, method: str, request: Request, candidates: list[Request]
) -> None:
    """Raises ScheduleError if a policy has chosen somebody else than one of the candidates."""
    if request not in candidates:
        problem = f"{shown(request)} is not one of {shown(candidates)}"
        raise ScheduleError(scheduler, method, problem)


def check_schedule(schedule: Schedule, scheduler: AnyScheduler, limits: Limits) -> None:
    """Raises ScheduleError if the items of the schedule cannot be run."""
    wrong = partial(ScheduleError, scheduler, "schedule")
    manager = scheduler.block_manager
    running = set(scheduler.running)
    seen: set[Sequence] = set()
    last_ones: list[int] = []  # items with the last token of their sequence
    for i, (seq, start, num_tokens) in enumerate(schedule.items):
        if seq in seen:
            raise wrong(f"{seq} is in the schedule twice")
        seen.add(seq)
        if seq.request not in running or seq.finish_reason is not None:
            why = "it has ended, or its request is not in scheduler.running"
            raise wrong(f"{seq} is in the schedule, but {why}")
        end = start + num_tokens
        if num_tokens < 1 or end > len(seq.token_ids):
            missing = f"{seq.num_missing_tokens} are missing"
            raise wrong(f"{seq} is to compute {num_tokens} tokens, but {missing}")
        if start != seq.num_computed_tokens:
            raise wrong(f"{seq} is to compute tokens from {start} on, but that is not the next one")
        if end > len(seq.block_table) * manager.block_size:
            lacks = "lacks blocks for them: allocate them first"
            raise wrong(f"{seq} is to compute {num_tokens} tokens, but {lacks}")
        block_id = seq.block_table[start // manager.block_size]
        if manager.blocks[block_id].ref_count > 1 and block_id not in manager.unwritten:
            others = "which others read: allocate copies it first"
            raise wrong(f"{seq} is to write into block {block_id}, {others}")
        if end == len(seq.token_ids):
            last_ones.append(i)
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        total = schedule.num_tokens if name == "max_num_batched_tokens" else len(schedule.items)
        limit = getattr(limits, name)
        if total > limit:
            raise wrong(f"the schedule has {total} {name.split('_')[-1]}, but {name}={limit}")
    check_sampled(schedule, last_ones, wrong)
    check_published(schedule, manager, wrong)
    if manager.moves:
        raise wrong("blocks are to be moved, but the schedule lacks them: call take_moves last")


def check_sampled(schedule: Schedule, last_ones: list[int], wrong: Wrong) -> None:
    """Whether those get a next token whose last one is computed, and all samples of a request
    together."""
    sampled = set(schedule.sampled)
    is_complete = len(sampled) == len(schedule.sampled_from)
    if not is_complete or [*dict.fromkeys(schedule.sampled_from)] != last_ones:
        raise wrong("who gets a token does not follow from its items: only commit adds an item")
    for request in {seq.request for seq in sampled if seq.request.params.n > 1}:
        unfinished = request.unfinished
        num_drawn = len(sampled.intersection(unfinished))
        if num_drawn < len(unfinished):
            who = f"{num_drawn} of {len(unfinished)} sequences of {request.request_id}"
            raise wrong(f"{who} would get a token: it must be all or none")


def check_published(schedule: Schedule, manager: BlockManager, wrong: Wrong) -> None:
    """Whether the step writes all blocks that can be found already."""
    if not manager.unwritten:
        return
    written: set[int] = set()
    for seq, start, num_tokens in schedule.items:
        first = start // manager.block_size
        last = (start + num_tokens) // manager.block_size
        written.update(seq.block_table[first:last])
    lost = manager.unwritten - written
    if lost:
        raise wrong(
            f"no sequence computes blocks {lost}, which can be found: keep what is committed"
        )
