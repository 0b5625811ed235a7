"""Turns: a lock for threads that share an engine."""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

LONGEST_STEP = 10.0  # seconds


class Turns:
    """A re-entrant lock that avoids starvation."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # whether this thread has it: a flag of ours would be wrong after a Ctrl-C
        self.is_taken_here: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.waiting: dict[int, bool] = {}  # threads, by their numbers
        self.process = os.getpid()
        in_use.add(self)

    @contextmanager
    def take(self) -> Iterator[None]:
        if os.getpid() != self.process:  # its threads, and who holds the lock, stayed there
            raise RuntimeError("this LLM belongs to the process before a fork: make a new one here")
        me = threading.get_ident()
        if self.waiting.keys() - {me}:
            time.sleep(1e-4)  # locks are not fair: in a loop of steps, this thread would be first
        self.waiting[me] = True
        try:
            with self.lock:
                self.waiting.pop(me, None)
                yield
        finally:
            self.waiting.pop(me, None)  # a Ctrl-C came while it waited


in_use: WeakSet[Turns] = WeakSet()


@atexit.register
def end_with_the_program() -> None:
    """Waits for a step that still runs in a daemon thread, and lets no further step start: PyTorch
    aborts the process if Python ends while a thread is inside PyTorch."""
    for turns in [*in_use]:
        turns.lock.acquire(timeout=LONGEST_STEP)
