"""Ranks as threads of one process: tensor parallelism without a network. And a single rank with a
network, which has no other rank to talk to.

Tests import this file. An example that does: pytest tests/parallel/test_shards.py
"""

from pathlib import Path
from threading import Barrier, Thread

import torch
import torch.distributed as dist

from nanovllm import LLM
from nanovllm.config import TOKENS_PER_STEP, Config
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import load_config
from nanovllm.topics.parallel.ranks import Group
from nanovllm.topics.parallel.runner import Follower, Leader, end_steps
from nanovllm.topics.parallel.watch import Watch


class Shared:
    def __init__(self, size: int):
        self.barrier = Barrier(size, timeout=60)
        self.values: list = [None] * size


class ThreadGroup:
    """What `ranks.Group` does, with a barrier."""

    def __init__(self, shared: Shared, rank: int):
        self.shared = shared
        self.rank = rank
        self.size = len(shared.values)
        self.watch = Watch(dist.HashStore(), self.size, patience=60)  # without a thread that looks
        self.num_gathered = 0
        self.num_added = 0

    def _exchange(self, value) -> list:
        self.shared.values[self.rank] = value
        self.shared.barrier.wait()
        values = [*self.shared.values]
        self.shared.barrier.wait()
        return values

    def meet(self, place: str) -> None:
        assert set(self._exchange(place)) == {place}

    def add_up(self, x):
        self.num_added += 1
        x.copy_(sum(self._exchange(x.clone())))
        return x

    def least(self, number: int) -> int:
        return min(self._exchange(number))

    def gather(self, x) -> list:
        self.num_gathered += 1
        parts = self._exchange(x)
        return parts if self.rank == 0 else []

    def tell(self, message) -> None:
        message.copy_(self._exchange(message)[0])


def arguments_of(device: torch.device, **options) -> tuple:
    """The arguments of a model runner."""
    config = Config(device=str(device), **options)
    path = Path(config.model)
    hf_config = load_config(path)
    limits = config.resolved(longest_context(hf_config), TOKENS_PER_STEP[device.type])
    return config, limits, hf_config, path, device


def one_rank(device: str, **options) -> LLM:
    """All collectives are called, also while steps are recorded, with one rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = Group(store, 0, 1, "127.0.0.1")
    group.connect(torch.device(device))
    leader = Leader(group, *arguments_of(torch.device(device), **options))
    return LLM(runner=leader, device=device, **options)


class Threads:
    """For a `with` block: an engine whose other ranks are threads. In float32, unless another dtype is asked for: each
    rank rounds its summand, so in bfloat16 other tokens may be drawn."""

    def __init__(self, path, size: int, **options):
        self.shared = Shared(size)
        self.options = {"dtype": "float32", **options, "model": str(path)}
        parallel = {"tensor_parallel_size": size, **self.options}
        self.arguments = arguments_of(torch.device("cpu"), **parallel)
        self.others = [Thread(target=self._follow, args=(i,)) for i in range(1, size)]
        self.followers: dict[int, Follower] = {}

    def _follow(self, rank: int) -> None:
        try:
            follower = Follower(ThreadGroup(self.shared, rank), *self.arguments)
            self.followers[rank] = follower
            follower.follow()
        except BaseException:
            self.shared.barrier.abort()
            raise

    def __enter__(self) -> LLM:
        for thread in self.others:
            thread.start()
        self.leader = Leader(ThreadGroup(self.shared, 0), *self.arguments)
        return LLM(runner=self.leader, **self.options)

    def __exit__(self, *_) -> None:
        end_steps(self.leader.group)
        self.leader.group.watch.close()
        for thread in self.others:
            thread.join(60)
            assert not thread.is_alive()
