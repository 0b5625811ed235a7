"""Watch: what rank 0 knows of the other ranks while its own thread waits for them. A call of gloo
or CUDA ends only if the other ranks take part. So a second thread watches them, and ends the call
if a rank has died or does not answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from nanovllm.recovery import RankError

SECONDS_BETWEEN = 0.25  # looks at the others
SECONDS_BETWEEN_BEATS = 0.5  # signs of life
SECONDS_TO_START = 60.0  # more than the timeout, for the first of them
GRACE = 5.0  # seconds for ranks to end, or to answer
LOST = 3  # the exit code of a rank that has lost another one


class Child:
    """The process of another rank, started by rank 0."""

    def __init__(self, settings: dict, num_threads: int):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (it is open as long as the process)
        folder = str(Path(__file__).parents[3])  # where the package lies
        paths = os.pathsep.join([folder, *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from nanovllm.topics.parallel import runner; runner.main()"],
            env={"OMP_NUM_THREADS": str(num_threads), **os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,  # Ctrl-C is for rank 0
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.flush()  # and it stays open: the process ends with it

    def cause_of_death(self) -> str:
        code = self.process.poll()
        if code in (None, LOST):
            return ""
        # by position, since two threads may ask
        text = os.pread(self.log.fileno(), 2**20, 0)
        lines = text.decode(errors="replace").splitlines()
        return " ".join([f"exit code {code}", *lines[-3:]])[:1000]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except BaseException as error:  # it takes too long, or a Ctrl-C has come
            self.process.kill()
            self.process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        self.log.close()


def repeat(seconds: float, function: Callable[[], object]) -> Callable[[], None]:
    """Calls a function in a thread every few seconds, until it returns something false. Returns a
    function that ends the thread."""
    is_over = threading.Event()

    def run() -> None:
        while function() and not is_over.wait(seconds):
            pass

    def stop() -> None:
        is_over.set()
        if threading.current_thread() is not thread:  # the garbage collector runs in any thread
            thread.join(GRACE)

    thread = threading.Thread(target=run, name="watch", daemon=True)
    thread.start()
    return stop


class Watch:
    """What rank 0 knows of the other ranks, and the reason if it has given up. Time is counted in
    looks, so none passes while rank 0 itself is stopped (Ctrl-Z)."""

    def __init__(self, store: dist.Store, size: int, patience: float):
        self.store = store
        self.size = size
        self.patience = patience  # seconds
        self.end = ""  # why it is over
        self.children: list[Child] = []
        # ends calls of NCCL that wait; those of gloo end by themselves
        self.abort: Callable[[], object] = lambda: None
        self.num_beats = [0] * size  # signs of life
        self.silence = [-SECONDS_TO_START] * size  # seconds since the last one
        self.num_interrupts = 0  # within a step
        self.wake, self.woken = socket.socketpair()
        self.wake.setblocking(False)
        self.woken.setblocking(False)

    def close(self) -> None:
        self.wake.close()
        self.woken.close()

    def look(self) -> bool:
        """Gives up if there is a reason. Returns whether to look again."""
        cause = self.cause_of_death() or self.cause_to_give_up()
        if cause:
            self.give_up(cause)
        return not cause

    def give_up(self, cause: str) -> None:
        """Ends the processes that rank 0 has started, and NCCL's calls. On other machines, gloo's
        calls end by themselves, a little later."""
        self.end = self.end or cause
        for child in self.children:
            child.process.kill()
        self.abort()

    def cause_of_death(self) -> str:
        """The cause why the first rank died; empty while all are known to live."""
        for rank in range(self.size):
            if self.store.check([f"died/{rank}"]):
                return f"rank {rank} has died: {self.store.get(f'died/{rank}').decode()}"
        for rank, child in enumerate(self.children, 1):
            cause = child.cause_of_death()
            if cause:
                return f"rank {rank} has died: {cause}"
        return ""

    def cause_to_give_up(self) -> str:
        for rank in range(1, self.size):
            num_beats = self.store.add(f"beat/{rank}", 0)
            is_new = num_beats != self.num_beats[rank]
            self.num_beats[rank] = num_beats
            self.silence[rank] = 0.0 if is_new else self.silence[rank] + SECONDS_BETWEEN
        longest = max(self.silence)
        silent = f"rank {self.silence.index(longest)} gives no sign of life"
        if longest > self.patience:
            return f"{silent} (rank_timeout={self.patience:g} seconds)"
        num_new = self.interrupts()  # meanwhile a step may set the number to 0
        self.num_interrupts += num_new
        if self.num_interrupts > 1:
            why = f", while {silent}" if longest > 2 * SECONDS_BETWEEN_BEATS else ""
            return f"a step was interrupted twice{why}"
        return ""

    def interrupts(self) -> int:
        """How many times Ctrl-C was pressed since the last call."""
        try:
            return self.woken.recv(1000).count(signal.SIGINT)
        except BlockingIOError:
            return 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for all that waits for other ranks. A Ctrl-C takes effect when the step ends,
        since otherwise the ranks would stop at different places. A second Ctrl-C ends the ranks.
        Raises RankError."""
        self.interrupts()
        self.num_interrupts = 0
        try:
            with interrupts_wait(self.wake.fileno()):
                yield
        except RuntimeError as error:
            if self.end:
                raise RankError(self.end) from error
            raise
        if self.end:  # the results of the step are lost
            raise RankError(self.end)


@contextmanager
def interrupts_wait(descriptor: int) -> Iterator[None]:
    """Delays a Ctrl-C to the end of this context. The signal's number is written to a descriptor at
    once, because Python's handlers wait for the call that runs."""
    is_main = threading.current_thread() is threading.main_thread()  # no other call is interrupted
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # None: not a handler of Python's
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    wake = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if wake != -1:  # an event loop needs its own
        signal.set_wakeup_fd(wake)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGINT, before)
        if seen:
            signal.raise_signal(signal.SIGINT)
