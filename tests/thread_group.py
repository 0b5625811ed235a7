"""Ranks as threads of one process: tensor parallelism without a network.

Tests import this file. An example that does: pytest tests/test_shards.py
"""

from pathlib import Path
from threading import Barrier, Thread

import torch

from nanovllm import LLM
from nanovllm.config import TOKENS_PER_STEP, Config
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import load_config
from nanovllm.parallel import Follower, Leader, end_steps


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
        self.end = ""
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


class Threads:
    """For a `with` block: an engine whose other ranks are threads."""

    def __init__(self, path, size: int, **options):
        path = Path(path)
        self.shared = Shared(size)
        config = Config(model=str(path), tensor_parallel_size=size, **options)
        hf_config = load_config(path)
        limits = config.resolved(longest_context(hf_config), TOKENS_PER_STEP["cpu"])
        self.arguments = (config, limits, hf_config, path, torch.device("cpu"))
        self.options = options | {"model": str(path)}
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
        for thread in self.others:
            thread.join(60)
            assert not thread.is_alive()
