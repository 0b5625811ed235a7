"""Inbox: new requests, and requests to abort, wait here until the next step starts. Threads that
share an engine take turns."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from weakref import WeakSet

from nanovllm.processing.states import RequestStates
from nanovllm.recovery import Recovery
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

LONGEST_STEP = 10.0  # seconds


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


class Turns:
    """A re-entrant lock, whose threads take turns. The lock itself is the context manager: no code
    in Python runs there, so a Ctrl-C cannot leave it taken."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # whether this thread has it: a flag of ours would be wrong after a Ctrl-C
        self.is_taken_here: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.last_thread = threading.get_ident()  # that has asked for the lock
        self.process = os.getpid()
        in_use.add(self)

    def take(self) -> AbstractContextManager[bool]:
        if os.getpid() != self.process:  # its threads, and who holds the lock, stayed there
            raise RuntimeError("this LLM belongs to the process before a fork: make a new one here")
        me = threading.get_ident()
        if self.last_thread != me:
            time.sleep(1e-4)  # locks are not fair: in a loop of steps, this thread would be first
        self.last_thread = me
        return self.lock


in_use: WeakSet[Turns] = WeakSet()


@atexit.register
def end_with_the_program() -> None:
    """Waits for a step that still runs in a daemon thread, and lets no further step start: PyTorch
    aborts the process if Python ends while a thread is inside PyTorch."""
    for turns in [*in_use]:
        turns.lock.acquire(timeout=LONGEST_STEP)
