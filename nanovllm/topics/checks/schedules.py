"""Schedules: checks the plans of a user's scheduler. Imports no torch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.options import is_int, shown
from nanovllm.schedule import Item, Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence
from nanovllm.topics.checks.classes import check_kept
from nanovllm.topics.checks.policies import check_policy
from nanovllm.topics.decoding.drafts import without_draft


@dataclass
class ScheduleChecks:
    """Checks the plans of a user's scheduler. A wrong plan raises a ScheduleError that names the
    method. The built-in scheduler runs without checks."""

    scheduler: Scheduler
    limits: Limits
    unfinished: dict[str, Any]  # the requests that it must serve, by id, the newest last
    looks_at_items: bool = True
    requests: tuple = ()  # how many they were, and the newest, in the last step
    num_idle_steps: int = 0  # since a request came, left or got a token ...
    num_idle_tokens: int = 0  # ... and the tokens that were computed in them

    def __post_init__(self):
        check_policy(self.scheduler)

    def schedule(self) -> Schedule:
        """Plans a step, and checks the plan."""
        schedule = self.scheduler.schedule()
        if not schedule.items:
            raise nothing_planned(self.scheduler, self.unfinished)
        if self.looks_at_items:
            check_schedule(schedule, self.scheduler, self.limits)
            check_kept(self.scheduler, schedule)
        self._check_progress(schedule)
        return schedule

    def update(self, schedule: Schedule, *drawn: Any) -> None:
        """Processes the step's result, and checks that this was done."""
        self.scheduler.update(schedule, *drawn)
        seq, start, _ = schedule.items[0]
        seq = without_draft(seq)
        if seq.num_computed_tokens == start and seq in seq.request.unfinished:
            raise ScheduleError(self.scheduler, "update", "it did nothing: does it call super()?")

    def _check_progress(self, schedule: Schedule) -> None:
        """Detects a livelock: preemptions so frequent that no request ever gets a token. Far more
        tokens are then computed than the requests have."""
        requests = len(self.unfinished), next(reversed(self.unfinished), None)
        if schedule.sampled or requests != self.requests:
            self.requests = requests
            self.num_idle_steps = self.num_idle_tokens = 0
            return
        self.num_idle_steps += 1
        self.num_idle_tokens += schedule.num_tokens
        if self.num_idle_steps <= self.limits.max_model_len:
            return
        unfinished = self.scheduler.unfinished()
        num_held = sum(len(seq) for request in unfinished for seq in request.unfinished)
        if self.num_idle_tokens > 4 * num_held:
            idle = f"{self.num_idle_steps} steps without a new token"
            raise ScheduleError(self.scheduler, "schedule", idle)


def nothing_planned(scheduler: Scheduler, unfinished: Collection[str]) -> ScheduleError:
    """Says why a plan without items is wrong. `unfinished` are the ids of the requests."""
    why = "the policy serves none of them"
    if lost := {*unfinished} - {request.request_id for request in scheduler.unfinished()}:
        why = f"neither waiting nor running: {shown(sorted(lost))}"
    elif not scheduler.running and scheduler.next_waiting() is None:
        why = "next_waiting() returned None, and no request runs"
    what = f"it planned nothing, but there are unfinished requests: {shown([*unfinished])}"
    return ScheduleError(scheduler, "schedule", f"{what}; {why}")


def check_schedule(schedule: Schedule, scheduler: Scheduler, limits: Limits) -> None:
    """Raises ScheduleError if the items of the schedule cannot be run."""
    wrong = partial(ScheduleError, scheduler, "schedule")
    manager = scheduler.block_manager
    running = set(scheduler.running)
    seen = set[Sequence]()
    for item in schedule.items:
        if not isinstance(item, Item):
            raise wrong(f"{shown(item)} is in the schedule, and not an Item")
        seq, start, num_tokens = item
        if seq in seen:
            raise wrong(f"{seq} is in the schedule twice")
        seen.add(seq)
        if seq.request not in running or seq.finish_reason:
            why = "it has ended, or its request is not in scheduler.running"
            raise wrong(f"{seq} is in the schedule, but {why}")
        end = start + num_tokens
        if not is_int(num_tokens, 1) or end > len(seq):
            missing = f"{seq.num_missing_tokens} are missing"
            raise wrong(f"{seq} is to compute {num_tokens} tokens, but {missing}")
        if start != seq.num_computed_tokens:
            raise wrong(f"{seq} is to compute tokens from {start} on, but that is not the next one")
        if end > limits.max_model_len:
            raise wrong(f"{seq} has {end} tokens, but max_model_len={limits.max_model_len}")
        if end > len(seq.block_table) * manager.block_size:
            raise wrong(f"{seq} lacks blocks for {num_tokens} tokens: allocate them first")
        block_id = seq.block_table[start // manager.block_size]
        if manager.blocks[block_id].ref_count > 1 and block_id not in manager.unwritten:
            raise wrong(f"{seq} is to write into block {block_id}, which others read")
    totals = {"max_num_batched_tokens": schedule.num_tokens, "max_num_seqs": len(schedule.items)}
    for name, total in totals.items():
        limit = getattr(limits, name)
        if total > limit:
            raise wrong(f"the schedule has {total} {name.split('_')[-1]}, but {name}={limit}")
    check_sampled(schedule, wrong)
    check_cached(schedule, manager, wrong)
    if manager.moves:
        raise wrong("blocks are to be moved, but the schedule lacks them: call take_moves last")


def check_sampled(schedule: Schedule, wrong: Callable) -> None:
    """Checks that exactly the sequences whose last token is computed get a next token, and that a
    request's samples get theirs together."""
    sampled = schedule.sampled.keys()
    last_ones = [seq for seq, start, n in schedule.items if start + n == len(seq)]
    if [*dict.fromkeys(schedule.sampled.values())] != last_ones:
        raise wrong("the sampled sequences do not match the items: add items with commit only")
    for request in {seq.request for seq in sampled if seq.request.params.n > 1}:
        unfinished = request.unfinished
        num_drawn = len(sampled & {*unfinished})
        if num_drawn < len(unfinished):
            what = f"{num_drawn} of {len(unfinished)} sequences of {request.request_id}"
            raise wrong(f"{what} would get a token: it must be all or none")


def check_cached(schedule: Schedule, manager: BlockManager, wrong: Callable) -> None:
    """Checks that the step computes all blocks that are cached already."""
    written = set[int]()
    for seq, start, num_tokens in schedule.items:
        first = start // manager.block_size
        last = (start + num_tokens) // manager.block_size
        written.update(seq.block_table[first:last])
    lost = manager.unwritten - written
    if lost:
        raise wrong(f"no sequence computes the cached blocks {lost}: keep what is committed")
