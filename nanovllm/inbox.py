"""Inbox: new requests, and requests to abort, wait here until the next step starts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from nanovllm.processing.states import RequestStates
from nanovllm.recovery import Recovery
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


@dataclass(eq=False, repr=False)
class Inbox:
    """Any code may append a request at any time: a hook within a step, another thread, the garbage
    collector."""

    scheduler: Scheduler
    states: RequestStates
    recovery: Recovery
    submitted: deque[Request] = field(default_factory=deque)  # to be queued; each has a state
    unwanted: deque[Request] = field(default_factory=deque)  # to be aborted

    def settle(self) -> None:
        """Aborts unwanted requests, then queues new ones."""
        while self.unwanted:
            self._abort(self.unwanted[0])
            self.unwanted.popleft()
        self.recovery.settle()
        while self.submitted and not self.recovery.suspects:
            request = self.submitted[0]
            state = self.states.of(request)
            if state is not None and not state.is_queued:  # the recovery may have queued it
                with self.recovery.changing(request):
                    state.is_queued = True
                    self.scheduler.add(request)
            self.submitted.popleft()

    def _abort(self, request: Request) -> None:
        state = self.states.of(request)
        if state is None:  # it has ended
            return
        with self.recovery.changing(request):
            for seq in request.unfinished:
                seq.finish_reason = "abort"
            self.states.report(state)
            self.scheduler.abort(request)
