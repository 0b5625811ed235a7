"""Faults: what to do when a step does not end well.

What counts is each request and the tokens of its sequences. The cache, the queues, the outputs and
their texts are made from them, so all of it can be made again, wherever a step has stopped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nanovllm.beam_search import BeamRequest
from nanovllm.block_manager import BlockManager
from nanovllm.replies import Replies, Reply
from nanovllm.schedule import CheckedScheduler, Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

logger = logging.getLogger(__name__)


class RankError(ConnectionError):
    """A rank has died, of those that compute together: no step is possible any longer."""


@dataclass(eq=False, repr=False)
class Faults:
    """Finds the request that made a step fail, and begins anew with the others."""

    scheduler: Scheduler
    checked: CheckedScheduler
    replies: Replies
    new_block_manager: Callable[[], BlockManager]
    is_changing: bool = False  # while the state changes; still set if that was interrupted
    submitted: deque[Request] = field(default_factory=deque)  # with a reply, but not queued yet
    schedule: Schedule | None = None  # of the step that runs
    suspects: list[list[Request]] = field(default_factory=list)
    """Groups of requests, one of which made a step fail: the last group runs, the others wait."""
    untested: set[Request] = field(default_factory=set)  # those in that group without a new token
    num_failed_steps: int = 0

    def _start_over(self) -> None:
        """Begins anew with an empty cache, from the tokens of each sequence. May itself be
        interrupted."""
        self.is_changing = True
        self.submitted.clear()  # all that have a reply are queued below
        replies = [*self.replies.unfinished.values()]
        for reply in replies:
            self._renew(reply)
        groups = [[r for r in group if not r.has_ended] for group in self.suspects]
        self.suspects = [group for group in groups if group]
        everybody = [reply.request for reply in replies if not reply.output.finished]
        group = self.suspects[-1] if self.suspects else everybody
        self.untested = set(group)
        self.checked.forget_idle_steps()
        manager = self.new_block_manager()
        try:
            self.scheduler.restart(manager)
        except Exception as error:  # from a hook; what is ours begins anew all the same
            logger.warning("restart failed: %r", error)
            Scheduler.restart(self.scheduler, manager)
        for request in group:
            try:
                self.scheduler.enqueue(request)
            except Exception as error:  # from a hook
                self._fail(request, error)
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
                    seq.finish_reason = self.scheduler.reason_to_end(seq)
        except Exception as error:  # from a hook: its own fault, and nobody else's
            reply.restart()
            self._fail(request, error)
            return
        reply.restart()
        self.replies.report(reply)

    def _accuse(self, error: Exception) -> None:
        """Halves the group of requests that may have made the step fail. One that fails alone ends
        with the error."""
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
