"""Overlap: a step is launched before the tokens of the step before it are read (chapter 11).

What a plan needs of these tokens is their number, not their values. So while a step is planned and
launched, each sequence that the step before samples has one more token, which is *pending*. No code
that looks at the values of tokens ever sees one. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple, Protocol

from nanovllm.schedule import Drawn, Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


class Launched(NamedTuple):
    """A step that has been launched, and whose tokens have not been read yet."""

    schedule: Schedule
    collect: Callable[[], Drawn]

    def read(self) -> Drawn:
        """Waits for the tokens. Those of sequences that have ended since the launch are dropped,
        and leave the schedule, too."""
        token_ids, logprobs = self.collect()
        schedule = self.schedule
        if not schedule.has_advanced:  # no step was read since the launch
            return token_ids, logprobs
        is_wanted = [seq.finish_reason is None for seq in schedule.sampled]
        schedule.num_wasted = is_wanted.count(False)
        if schedule.num_wasted:
            schedule.sampled = dict(compress(schedule.sampled.items(), is_wanted))
            token_ids = [*compress(token_ids, is_wanted)]
            logprobs = logprobs and [*compress(logprobs, is_wanted)]
        return token_ids, logprobs


class Flight(Protocol):
    """What Recovery knows of the steps."""

    schedule: Schedule | None  # of the step that runs
    in_flight: Launched | None
    suspects: deque[Request]


def run_ahead(
    scheduler: Scheduler, runner: Any, recovery: Flight, is_ahead: bool
) -> tuple[Schedule, Drawn]:
    """The step in flight, and its tokens. If `is_ahead`, the next step is launched before they are
    read, unless it can only be planned with them."""
    step = recovery.in_flight or launched(scheduler, runner, recovery)
    assert step is not None, "nothing runs, so the first waiting request fits"
    recovery.in_flight = None
    # a suspect runs alone, without overlap: if it fails, its last token has been read
    must_read = recovery.suspects or reads_first(scheduler, step.schedule)
    if is_ahead and not must_read:
        if not step.schedule.has_advanced:
            scheduler.advance(step.schedule)
        with pending(step.schedule):
            recovery.in_flight = behind = launched(scheduler, runner, recovery)
        if behind is not None:  # now: tokens that are read next may free its blocks
            scheduler.advance(behind.schedule)
    recovery.schedule = step.schedule
    return step.schedule, step.read()


def launched(scheduler: Scheduler, runner: Any, recovery: Flight) -> Launched | None:
    """Plans a step, and lets the device start it. None if there is nothing to compute: all that
    runs ends with its pending token."""
    schedule = scheduler.schedule()
    if not schedule.items:
        return None
    recovery.schedule = schedule
    return Launched(schedule, runner.launch(schedule))


def reads_first(scheduler: Scheduler, schedule: Schedule) -> bool:
    """Whether the step behind this one can only be planned once the tokens of this one are read."""
    if scheduler.proposer is not None:
        return True  # draft tokens follow from the last tokens
    if schedule.scored:
        return True  # a prompt that lacks log-probabilities takes no blocks from the prefix cache
    num_seqs = sum([request.params.n for request in scheduler.running])
    if scheduler.block_manager.num_free_blocks < num_seqs:
        return True  # a request might be preempted, although another one ends with this step
    # beams go on or end by their tokens; penalties and grammars look at tokens on the host
    return any([seq.request.is_search or seq.request.needs_rules for seq in schedule.sampled])


@contextmanager
def pending(schedule: Schedule) -> Iterator[None]:
    """Gives each unfinished sequence that this step samples a pending token: the id -2 - row, where
    row is its place in `schedule.sampled`. At the end, the pending tokens are taken away again."""
    try:
        for row, seq in enumerate(schedule.sampled):
            if seq.finish_reason is None:
                seq.token_ids.append(-2 - row)
        yield
    finally:
        for seq in schedule.sampled:
            seq.forget_pending()
