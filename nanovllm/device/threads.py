"""Threads: keeps PyTorch fast on a busy CPU. It uses no more threads than there are free
processors."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

SMALL_STEP = 8e6  # multiplications per layer
SECONDS_BETWEEN_LOOKS = 0.2  # the system counts in hundredths of a second


def quota() -> float:
    """How many processors' time the container of this process may use (cgroups, version 2)."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_bytes().split()
    except OSError:  # there is no container
        return math.inf
    return math.inf if most == b"max" else int(most) / int(period)


def own_cpus() -> set[int]:
    """The logical processors that this process may use: all, if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def busy_seconds() -> float | None:
    """The busy seconds of our processors so far, over all programs; None if the system does not
    say."""
    try:
        lines = Path("/proc/stat").read_bytes().decode().splitlines()
    except OSError:
        return None
    ours = {f"cpu{cpu}" for cpu in own_cpus()}
    ticks = 0
    for line in lines:
        name, *times = line.split()
        if name in ours:
            # user, nice, system; then, behind idle and waiting, interrupts and other machines
            ticks += sum(map(int, times[:3] + times[5:8]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """One reading of the clocks, in seconds."""

    time: float
    own: float  # that this process has worked
    busy: float | None  # that our processors have worked, for any program


def look() -> Look:
    return Look(time.perf_counter(), time.process_time(), busy_seconds())


@cache
def limit_of_process() -> int:
    """PyTorch's number of threads, as it is the first time. A thread that first uses PyTorch while
    another thread's step runs on fewer threads keeps the smaller number."""
    return torch.get_num_threads()


class Threads:
    """Uses as many threads for a step as there are processors that no other program needs.

    All threads of an operation wait for the slowest. If another program is using that thread's
    processor, they all wait for its next turn, and a step has some 200 operations. Where the system
    does not say how busy other programs are, a small step runs on one thread and a large one on
    all. There are never more threads than PyTorch has when the first engine of the process is made,
    and never more than a container's share of the processors. A number that was set by
    OMP_NUM_THREADS is left alone.
    """

    def __init__(self) -> None:
        self.most = max(1, int(min(len(own_cpus()), quota())))
        is_chosen = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
        # other backends cannot change it
        self.is_openmp = "backend: OpenMP" in torch.__config__.parallel_info()
        self.can_change = self.is_openmp and not is_chosen
        self.limit = limit_of_process()
        self.num_others = 0.0  # processors that other programs have used recently
        self.last_look = look()
        self.last_step = 0.0  # when it ended

    def wanted(self, limit: int, work: float) -> int:
        last = self.last_look
        if last.busy is None:
            return 1 if work < SMALL_STEP else limit
        if time.perf_counter() - last.time > SECONDS_BETWEEN_LOOKS:
            now = self.last_look = look()
            # after a pause of ours, the time between tells nothing: others may have had their turn
            if now.busy is not None and now.time - self.last_step < SECONDS_BETWEEN_LOOKS:
                others = (now.busy - last.busy) - (now.own - last.own)
                self.num_others = others / (now.time - last.time)
        num_others = math.ceil(self.num_others - 0.25)  # 0.25 for background work and errors
        return max(1, limit - max(0, num_others))

    @contextmanager
    def of_step(self, work: float) -> Iterator[None]:
        """Sets the threads for a step with `work` multiplications per layer."""
        if self.can_change and self.limit > 1:
            torch.set_num_threads(self.wanted(min(self.limit, self.most), work))
        try:
            yield
        finally:
            self.last_step = time.perf_counter()
            if self.is_openmp:
                torch.set_num_threads(self.limit)

    def finish_alone(self) -> None:
        """The rest of a step runs on one thread. PyTorch's others would look for work until the
        next step, in which other threads need their processors."""
        if self.is_openmp:
            torch.set_num_threads(1)
