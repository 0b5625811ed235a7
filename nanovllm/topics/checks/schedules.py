"""Schedules: checks the plans of a user's scheduler. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.options import shown
from nanovllm.schedule import Item, Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.checks.classes import methods_of, own_methods
from nanovllm.topics.checks.contents import Contents
from nanovllm.topics.checks.effects import KEYS, check_keys
from nanovllm.topics.checks.policies import VALUES, check_policy
from nanovllm.topics.decoding.drafts import without_draft
from nanovllm.topics.swapping.tiers import TwoTiers


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
    num_steps: int = 0
    manager: BlockManager = field(init=False)  # a failed step brings a new one
    contents: Contents = field(init=False)

    def __post_init__(self):
        check_policy(self.scheduler)
        self._take_manager()

    def _take_manager(self) -> None:
        self.manager = self.scheduler.block_manager
        check_policy(self.manager)
        self.contents = Contents(self.manager.block_size)

    def schedule(self) -> Schedule:
        """Plans a step, and checks the plan."""
        scheduler = self.scheduler
        if scheduler.block_manager is not self.manager:
            self._take_manager()
        share = scheduler.watermark
        if not (isinstance(share, Real) and 0 <= share <= 1):
            problem = f"it is {shown(share)}, and not a number from 0 to 1"
            raise ScheduleError(scheduler, "watermark", problem)
        try:
            schedule = scheduler.schedule()
        except Exception as error:
            if not isinstance(error, ScheduleError):
                check_order(scheduler)  # it may have queued or sorted requests wrongly
            raise
        if not schedule.items:
            self._check_blocks()
            raise nothing_planned(scheduler, self.unfinished)
        if self.looks_at_items:
            self._check_items(schedule)
        self._check_progress(schedule)
        return schedule

    def _check_items(self, schedule: Schedule) -> None:
        """Visits the items in each step, and all blocks in each step if a user counts them, else in
        one of several steps, as there are many blocks."""
        scheduler, manager = self.scheduler, self.manager
        check_schedule(schedule, scheduler, self.limits)
        if found := self.contents.go_on(schedule.items, schedule.moves):
            seq, block_id = found
            problem = f"{seq} reads block {block_id}, which does not hold its tokens"
            is_cached = manager.blocks[block_id].key is not None
            suspects = CACHING if is_cached and own_methods(manager, CACHING) else MOVING
            raise blamed(scheduler, problem, suspects)
        self.num_steps += 1
        i = self.num_steps % len(scheduler.running)  # two requests, in each step other ones
        check_keys(scheduler, "running_order", scheduler.running[i : i + 2])
        num_blocks = len(manager.blocks) + (len(manager.host.blocks) if manager.host else 0)
        is_own = type(manager) not in (BlockManager, TwoTiers)
        if is_own or self.num_steps % (1 + num_blocks // 32) == 0:
            self._check_blocks()

    def _check_blocks(self) -> None:
        check_order(self.scheduler)
        try:
            requests = self.scheduler.running + self.scheduler.waiting  # not a user's unfinished()
            check_blocks(self.manager, [seq for each in requests for seq in each.unfinished])
        except AssertionError as error:
            problem = f"the blocks do not add up: {error}"
            raise blamed(self.scheduler, problem) from error

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
    what = f"there are unfinished requests: {shown([*unfinished])}"
    return blamed(scheduler, f"the step has planned nothing, but {what}; {why}")


def check_schedule(schedule: Schedule, scheduler: Scheduler, limits: Limits) -> None:
    """Raises ScheduleError if the items of the schedule cannot be run."""
    wrong = partial(blamed, scheduler)
    manager = scheduler.block_manager
    blocks = manager.blocks
    size = manager.block_size
    most = limits.max_model_len
    running = set(scheduler.running)
    num_planned = 0
    last_ones = []  # sequences whose last token is computed
    for item in schedule.items:
        if not isinstance(item, Item):
            raise wrong(f"{shown(item)} is in the schedule, and not an Item")
        seq, start, num_tokens = item
        table = seq.block_table
        length = len(seq.token_ids)
        if seq.request not in running or seq.finish_reason:
            why = "it has ended, or its request is not in scheduler.running"
            raise wrong(f"{seq} is in the schedule, but {why}")
        end = start + num_tokens
        if type(num_tokens) is not int or num_tokens < 1 or end > length:
            missing = f"{seq.num_missing_tokens} are missing"
            raise wrong(f"{seq} is to compute {num_tokens} tokens, but {missing}")
        if start != seq.num_computed_tokens:
            raise wrong(f"{seq} is to compute tokens from {start} on, but that is not the next one")
        if end > most:
            raise wrong(f"{seq} has {end} tokens, but max_model_len={most}")
        if end > len(table) * size:
            raise wrong(f"{seq} lacks blocks for {num_tokens} tokens: allocate them first")
        block_id = table[start // size]
        if blocks[block_id].ref_count > 1 and block_id not in manager.unwritten:
            raise wrong(f"{seq} is to write into block {block_id}, which others read")
        num_planned += num_tokens
        if end == length:
            last_ones.append(seq)
    seqs = [seq for seq, _, _ in schedule.items]
    if len({*seqs}) < len(seqs):
        raise wrong(f"{max(seqs, key=seqs.count)} is in the schedule twice")
    totals = {"max_num_batched_tokens": num_planned, "max_num_seqs": len(schedule.items)}
    for name, total in totals.items():
        limit = getattr(limits, name)
        if total > limit:
            raise wrong(f"the schedule has {total} {name.split('_')[-1]}, but {name}={limit}")
    check_sampled(schedule, last_ones, running, wrong)
    if manager.moves:
        raise wrong("blocks are to be moved, but the schedule lacks them: call take_moves last")


def check_sampled(schedule: Schedule, last_ones: list, running: set, wrong: Callable) -> None:
    """Checks that exactly the sequences whose last token is computed get a next token, and that a
    request's samples get theirs together."""
    rows = [*schedule.sampled.values()]
    if rows != last_ones and [*dict.fromkeys(rows)] != last_ones:
        raise wrong("the sampled sequences do not match the items: add items with commit only")
    for request in [one for one in running if one.params.n > 1]:
        unfinished = request.unfinished
        num_drawn = len(schedule.sampled.keys() & {*unfinished})
        if 0 < num_drawn < len(unfinished):
            what = f"{num_drawn} of {len(unfinished)} sequences of {request.request_id}"
            raise wrong(f"{what} would get a token: it must be all or none")


def check_queues(
    scheduler: Scheduler, queued: list[Request], requests: Collection[Request]
) -> None:
    """Raises ScheduleError unless each of these unfinished requests, and no other, is queued
    once."""
    counts = Counter(queued)
    unfinished = set(requests)
    for request in counts.keys() | unfinished:
        if counts[request] != (request in unfinished):
            state = "has not ended" if request in unfinished else "has ended"
            how = f"is {counts[request]} times in waiting and running"
            raise blamed(scheduler, f"{request} {state}, but {how}")


def check_order(scheduler: Scheduler) -> None:
    """Raises ScheduleError if a request is queued twice, or if the queues cannot be sorted."""
    queued = scheduler.running + scheduler.waiting
    check_queues(scheduler, queued, [one for one in queued if one.is_new or not one.has_ended])
    for name, queue in KEYS.items():
        check_keys(scheduler, name, getattr(scheduler, queue))


# the methods of a block manager that decide which tokens are in which block
MOVING = "take_moves", "fork", "allocate"
CACHING = "find_prefix", "cache_full_blocks", "take_prefix"


def blamed(scheduler: Scheduler, problem: str, suspects: tuple[str, ...] = ()) -> ScheduleError:
    """The error of the user's own methods among these suspects of the block manager. Without any,
    it is the error of the only own method of the scheduler that may be to blame, or of `schedule`;
    and if the scheduler is not the user's, of all own methods of the block manager."""
    manager = scheduler.block_manager
    if type(scheduler) is Scheduler:
        suspects = suspects or tuple(sorted(methods_of(BlockManager)))
    if own := own_methods(manager, suspects):
        return ScheduleError(manager, " or ".join(own), problem)
    own = own_methods(scheduler, methods_of(Scheduler).difference(VALUES, KEYS))
    return ScheduleError(scheduler, own[0] if len(own) == 1 else "schedule", problem)
