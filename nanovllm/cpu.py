"""What makes PyTorch pleasant on a CPU: memory that is kept, and as many threads as a step is worth."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanovllm.models.qwen import Qwen
from nanovllm.scheduler import Schedule

SMALL_STEP = 8e6  # multiplications in a layer


def keep_freed_memory() -> None:
    """glibc gives large freed tensors back to the system at once, and the next step faults all their pages in again."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: give back what is free beyond 1 GiB
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: 32 MiB is the largest that it takes


def default_thread_counts() -> set[int]:
    """How many threads PyTorch takes unless it is told: one per processor, or one per core, which may be two of them."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus]
    return {len(cpus), len({file.read_text() for file in files if file.exists()})}


class Threads:
    """One thread for the operations of a small step, all for those of a large one.

    A small operation is over before a second thread has been woken. And if that one's processor does something else at
    the moment, both wait until it is their turn, some 200 times per step. A thread count that somebody has chosen, by
    OMP_NUM_THREADS or torch.set_num_threads, is left alone.
    """

    def __init__(self, model: Qwen, device: torch.device):
        layer = model.model.layers[0]
        self.num_weights = sum(weight.numel() for weight in layer.parameters())
        self.query_size = layer.self_attn.sizes[0] * layer.self_attn.head_dim
        self.defaults = default_thread_counts()
        is_chosen = "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ
        self.can_change = (
            device.type == "cpu" and not is_chosen and "backend: OpenMP" in torch.__config__.parallel_info()
        )
        self.to_restore: int | None = None  # within a small step, or after one that was interrupted

    def is_small(self, schedule: Schedule) -> bool:
        work = schedule.num_tokens * self.num_weights
        if work < SMALL_STEP:  # then there are few sequences to ask for their contexts
            pairs = sum(num_tokens * (seq.num_computed_tokens + num_tokens) for seq, num_tokens in schedule.items)
            work += 2 * self.query_size * pairs
        return work < SMALL_STEP

    @contextmanager
    def of_step(self, schedule: Schedule) -> Iterator[None]:
        now = self.to_restore or torch.get_num_threads()
        if now == 1 or now not in self.defaults or not self.can_change or not self.is_small(schedule):
            yield
            return
        self.to_restore = now
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(now)
            self.to_restore = None
