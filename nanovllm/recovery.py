"""Recovery: adds and aborts requests between steps, and restores the state after a failed step.

Only the requests and their tokens must survive a step that has failed, or was interrupted. The
cache, the queues, the outputs and their texts are made from them again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nanovllm.block_manager import BlockManager
from nanovllm.decoding.beam_search import BeamRequest
from nanovllm.frontend.replies import Replies, Reply
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

logger = logging.getLogger(__name__)


class RankError(ConnectionError):
    """A rank of tensor parallelism has died: no step is possible any longer."""


@dataclass(eq=False, repr=False)
class Recovery:
    """Keeps the scheduler and the replies true to the requests.

    Any code may append to `submitted` and `unwanted` at any time: a hook within a step, another
    thread, Python's garbage collector. `settle` carries it out before the next step.
    """

    scheduler: Scheduler
    replies: Replies
    new_block_manager: Callable[[], BlockManager]
    submitted: deque[Request] = field(default_factory=deque)  # with a reply, but not queued yet
    unwanted: deque[Request] = field(default_factory=deque)  # to be aborted
    is_changing: bool = False  # while the state changes; still set if that was interrupted
    schedule: Schedule | None = None  # of the step that runs
    suspects: list[list[Request]] = field(default_factory=list)
    """Groups of requests, one of which made a step fail: the last group runs, the others wait."""
    untested: set[Request] = field(default_factory=set)  # in that group, without a new token
    num_failed_steps: int = 0

    def settle(self) -> None:
        """Makes the state such that a step can begin."""
        if self.is_changing:  # the last change was interrupted
            self._start_over()
        while self.unwanted:
            self._end(self.unwanted[0])
            self.unwanted.popleft()
        while self.suspects and not any(request.unfinished for request in self.untested):
            self.is_changing = True
            self.suspects.pop()  # this group has not failed, or has ended: the next one runs
            self._start_over()
        while self.submitted and not self.suspects:
            self._queue(self.submitted[0])

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Runs a step so that an exception ends at most the request that has caused it."""
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

    # --- requests come and go ---

    def _queue(self, request: Request) -> None:
        self.is_changing = True
        if self.replies.to(request) is not None:  # otherwise its submission was interrupted
            self._try(self.scheduler.add, request)
        self.submitted.popleft()
        self.is_changing = False

    def _try(self, queue: Callable[[Request], None], request: Request) -> None:
        try:
            queue(request)
        except Exception as error:  # from a hook, perhaps after the request has been queued
            self._fail(request, error)
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)

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
        self.is_changing = False

    # --- a step has failed ---

    def _accuse(self, error: Exception) -> None:
        """Bisects the group of requests that may have made the step fail. A request that fails
        alone ends with the error."""
        self.num_failed_steps += 1
        logger.warning("a step failed: %r", error)
        is_apart = bool(self.suspects) or len(self.replies.unfinished) == 1
        if self.suspects:
            group = self.suspects.pop()
        elif self.schedule is not None:
            group = [*dict.fromkeys(item.seq.request for item in self.schedule.items)]
        else:
            group = [reply.request for reply in self.replies.unfinished.values()]
        if is_apart and len(group) == 1:
            self._fail(group[0], error)
        else:
            half = len(group) // 2
            self.suspects += [group[half:], group[:half]]

    def _fail(self, request: Request, error: Exception) -> None:
        logger.warning("%r failed: %r", request, error)
        reply = self.replies.to(request)
        if reply is not None:  # otherwise it ended in the step that failed
            self.replies.report(reply, error)

    def _start_over(self) -> None:
        """Begins anew with an empty cache, from the tokens of each sequence. May itself be
        interrupted."""
        self.is_changing = True
        self.schedule = None
        self.submitted.clear()  # all that have a reply are queued below
        replies = [*self.replies.unfinished.values()]
        for reply in replies:
            self._renew(reply)
        groups = [[r for r in group if not r.has_ended] for group in self.suspects]
        self.suspects = [group for group in groups if group]
        unfinished = [reply.request for reply in replies if not reply.output.finished]
        group = self.suspects[-1] if self.suspects else unfinished
        self.untested = set(group)
        manager = self.new_block_manager()
        try:
            self.scheduler.restart(manager)
        except Exception as error:  # from a hook; what is ours begins anew all the same
            logger.warning("restart failed: %r", error)
            Scheduler.restart(self.scheduler, manager)
        for request in group:
            self._try(self.scheduler.enqueue, request)
        self.is_changing = False

    def _renew(self, reply: Reply) -> None:
        request = reply.request
        request.rewind()
        if request.is_new:
            return
        try:
            for seq in request.sequences:
                seq.finish_reason = None
                if not isinstance(request, BeamRequest):  # a search ends in its own way
                    reason = self.scheduler.reason_to_end(seq)
                    seq.finish_reason = reason if isinstance(reason, str) else None
        except Exception as error:  # from a hook: its own fault, and no other request's
            reply.restart()
            self._fail(request, error)
            return
        reply.restart()
        self.replies.report(reply)
