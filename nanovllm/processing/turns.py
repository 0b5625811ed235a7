"""Turns: a lock for threads that share an engine."""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakSet

LONGEST_STEP = 10.0  # seconds


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
