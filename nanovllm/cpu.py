"""What keeps PyTorch fast on a busy CPU: no more threads than there are free processors."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SMALL_STEP = 8e6  # multiplications per layer


def default_thread_counts() -> set[int]:
    """How many threads PyTorch may use by default: one per logical processor, or one per core."""
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    files = [
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus
    ]
    return {len(cpus), len({file.read_text() for file in files if file.exists()})}


def busy_seconds() -> float | None:
    """Total busy seconds of our processors, over all programs. None if the system does not say."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    ours = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    times = [
        fields[1:4] + fields[6:9] for fields in lines if fields[0] in ours
    ]  # without idle and I/O wait
    return sum(int(time) for fields in times for time in fields) / os.sysconf("SC_CLK_TCK")


class Threads:
    """Uses as many threads for a step as there are processors that no other program needs.

    All threads of an operation wait for the slowest. If another program is using that thread's processor, they all wait
    for its next turn, and a step has some 200 operations. Where the system does not say how busy other programs are, a
    small step runs on one thread and a large one on all. A number of threads that was set by OMP_NUM_THREADS or
    torch.set_num_threads is left alone.
    """

    def __init__(self, device: torch.device):
        self.defaults = default_thread_counts()
        is_chosen = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
        is_openmp = (
            "backend: OpenMP" in torch.__config__.parallel_info()
        )  # other backends cannot change it
        self.can_change = device.type == "cpu" and is_openmp and not is_chosen
        self.to_restore: int | None = None  # during a step, or after an interrupted one
        self.num_others = 0.0  # processors that other programs have used recently
        self.last_look = time.perf_counter(), time.process_time(), busy_seconds()

    def wanted(self, most: int, work: float) -> int:
        then, own, busy = self.last_look
        if busy is None:
            return 1 if work < SMALL_STEP else most
        if time.perf_counter() - then > 0.2:  # the system counts in hundredths of a second
            now = self.last_look = time.perf_counter(), time.process_time(), busy_seconds()
            self.num_others = ((now[2] or busy) - busy - (now[1] - own)) / (now[0] - then)
        others = max(0, math.ceil(self.num_others - 0.25))  # 0.25 for background work and errors
        return max(1, most - others)

    @contextmanager
    def of_step(self, work: float) -> Iterator[None]:
        """Sets the threads for a step with `work` multiplications per layer."""
        most = self.to_restore or torch.get_num_threads()
        if self.can_change and most > 1 and most in self.defaults:
            wanted = self.wanted(most, work)
            if wanted < most:
                self.to_restore = most
                torch.set_num_threads(wanted)
        try:
            yield
        finally:
            if self.to_restore is not None:
                torch.set_num_threads(most)
                self.to_restore = None
