"""Recovery: restores the engine after a step that failed or was interrupted.

Only the requests and their tokens survive such a step. The cache, the queues, the outputs and their
texts are rebuilt from them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import AcceleratorError

from nanovllm.block_manager import BlockManager
from nanovllm.processing.states import RequestState, RequestStates
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

if TYPE_CHECKING:
    from nanovllm.device.overlap import Launched

logger = logging.getLogger(__name__)


class RankError(ConnectionError):
    """A rank of tensor parallelism has died, so no further step is possible."""


@dataclass(eq=False, repr=False)
class Recovery:
    """Keeps the scheduler and the states consistent with the requests.

    After a failed step, its requests run one by one, each until it has a new token or fails alone.
    """

    scheduler: Scheduler
    states: RequestStates
    new_block_manager: Callable[[], BlockManager]
    is_changing: bool = False  # while the state changes; still set if that was interrupted
    schedule: Schedule | None = None  # of the step that runs
    in_flight: Launched | None = None  # the step behind it, if it has been launched already
    suspects: deque[Request] = field(default_factory=deque)
    """Requests of a step that failed. The first one runs alone; all other requests wait."""
    has_passed: bool = False  # whether the first suspect has got a token
    num_failed_steps: int = 0

    def settle(self) -> None:
        """Restores the engine after an interrupt, and moves on to the next suspect."""
        if self.is_changing:
            self._start_over()
        while self.suspects and (self.has_passed or self.suspects[0].has_ended):
            self.is_changing = True
            self.suspects.popleft()
            self._start_over()

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Runs a step. An exception ends at most the request that caused it."""
        self.is_changing = True
        self.schedule = None
        try:
            yield
            if self.suspects and self.schedule is not None:
                sampled = {seq.request for seq in self.schedule.sampled}
                self.has_passed = self.suspects[0] in sampled
            self.is_changing = False
        except (ScheduleError, RankError, AcceleratorError, KeyboardInterrupt):
            # no request caused it; a GPU fails in all later steps, too
            self._start_over()
            raise
        except Exception as error:
            self._on_failed_step(error)
            self._start_over()

    @contextmanager
    def changing(self, request: Request) -> Iterator[None]:
        """Lets a request into the scheduler, or out of it. If this raises, only this request
        ends."""
        if self.is_changing:
            self._start_over()
        self.is_changing = True
        try:
            yield
        except Exception as error:  # from a hook, perhaps after the request has been queued
            self._fail(request, error)
            self._start_over()
        self.is_changing = False

    # --- inside ---

    def _on_failed_step(self, error: Exception) -> None:
        self.num_failed_steps += 1
        logger.warning("a step failed: %r", error)
        if self.suspects:  # it has run alone
            self._fail(self.suspects.popleft(), error)
        elif self.schedule is not None:
            self.suspects.extend(dict.fromkeys(item.seq.request for item in self.schedule.items))
        else:
            self.suspects.extend(state.request for state in self.states.unfinished.values())

    def _fail(self, request: Request, error: Exception) -> None:
        logger.warning("%r failed: %r", request, error)
        state = self.states.of(request)
        if state is not None:  # otherwise it ended in the step that failed
            self.states.report(state, error)

    def _start_over(self) -> None:
        """Starts again with an empty cache, from the tokens of each sequence. May itself be
        interrupted."""
        self.is_changing = True
        self.schedule = None
        self.in_flight = None
        self.has_passed = False
        states = [*self.states.unfinished.values()]
        for state in states:
            self._renew(state)
        manager = self.new_block_manager()
        try:
            self.scheduler.restart(manager)
        except Exception as error:  # from a hook
            logger.warning("restart failed: %r", error)
            Scheduler.restart(self.scheduler, manager)
        for state in states:
            is_held = self.suspects and state.request is not self.suspects[0]
            has_ended = self.states.of(state.request) is None
            if not (has_ended or is_held):
                self._queue_again(state)
        self.is_changing = False

    def _renew(self, state: RequestState) -> None:
        request = state.request
        request.rewind()
        if request.is_new:
            return
        try:
            for seq in request.sequences:
                seq.finish_reason = None
                if not request.is_search:  # a search ends in its own way
                    reason = self.scheduler.reason_to_end(seq)
                    seq.finish_reason = reason if isinstance(reason, str) else None
        except Exception as error:  # from a hook
            state.restart()
            self._fail(request, error)
            return
        state.restart()
        self.states.report(state)

    def _queue_again(self, state: RequestState) -> None:
        state.is_queued = True
        request = state.request
        try:
            self.scheduler.enqueue(request)
        except Exception as error:  # from a hook, perhaps after the request has been queued
            self._fail(request, error)
            while request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
