"""Recovery: what comes and goes between two steps, and the fence around each."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanovllm.faults import Faults, RankError
from nanovllm.schedule import ScheduleError
from nanovllm.sequence import Request

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Recovery(Faults):
    """Keeps the scheduler and the replies true to the requests.

    Anybody may append to `submitted` and `unwanted` at any time: a hook within a step, another
    thread, Python's garbage collector. `settle` carries it out before the next step.
    """

    unwanted: deque[Request] = field(default_factory=deque)  # to be aborted

    def settle(self) -> None:
        """Makes the state such that a step can begin."""
        if self.is_changing:  # what came last was interrupted
            self._start_over()
        while self.unwanted:
            self._end(self.unwanted[0])
            self.unwanted.popleft()
        if self.suspects and not any(request.unfinished for request in self.untested):
            self.is_changing = True
            self.suspects.pop()  # innocent, or gone: the next group runs
            self._start_over()
        while self.submitted and not self.suspects:
            self._queue(self.submitted[0])

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """A step runs within. An exception ends at most the request that has caused it."""
        self.is_changing = True
        self.schedule = None
        try:
            yield
            if self.suspects and self.schedule is not None:
                self.untested.difference_update(seq.request for seq in self.schedule.sampled)
            self.is_changing = False
        except (ScheduleError, RankError, KeyboardInterrupt):  # not the fault of any request
            self._start_over()
            raise
        except Exception as error:
            self._accuse(error)
            self._start_over()

    # --- what comes and goes ---

    def _queue(self, request: Request) -> None:
        self.is_changing = True
        try:
            if self.replies.to(request) is not None:  # otherwise its submission was interrupted
                self.scheduler.add(request)
        except Exception as error:  # from a hook, perhaps after it has been queued
            self._fail(request, error)
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
        self.submitted.popleft()
        self.checked.forget_idle_steps()
        self.is_changing = False

    def _end(self, request: Request) -> None:
        """Aborts a request, unless it has ended by itself."""
        reply = self.replies.to(request)
        if reply is None:
            return
        self.is_changing = True
        for seq in request.unfinished:
            seq.finish_reason = "abort"
        self.replies.report(reply)
        try:
            self.scheduler.abort(request)
        except Exception as error:  # from a hook; the request has ended all the same
            logger.warning("aborting %r failed: %r", request, error)
            self._start_over()
        self.checked.forget_idle_steps()
        self.is_changing = False
