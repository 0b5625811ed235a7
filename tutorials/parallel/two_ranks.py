"""Two ranks and a clock, for chapter 18.

A rank is a thread here. It computes on one core, and hears of the other rank only what that one
sends. What it does for each token is timed: it computes, or it waits.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import NamedTuple

import torch
from torch import Tensor

SECONDS = 60.0  # until the other rank must have sent something
Wait = tuple[float, float]  # its start and its end


class Turn(NamedTuple):
    """What a rank has done for one token."""

    begin: float
    end: float
    waits: list[Wait]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def seconds_waited(self) -> float:
        return sum(end - begin for begin, end in self.waits)


class Rank:
    """What a rank can do with the other one."""

    def __init__(self, number: int, to_me: Queue, to_other: Queue):
        self.number = number
        self.to_me = to_me
        self.to_other = to_other
        self.waits: list[Wait] = []  # of the present token

    def send(self, x: Tensor) -> None:
        self.to_other.put(x)

    def receive(self) -> Tensor:
        begin = time.perf_counter()
        x = self.to_me.get(timeout=SECONDS)
        self.waits.append((begin, time.perf_counter()))
        return x

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of what both ranks bring. Both get it."""
        self.send(x)
        return x + self.receive()


Work = Callable[[Rank, Tensor], Tensor]
Turns = list[Turn]  # of one token, those of all ranks


def matrices(hidden: int, middle: int) -> tuple[Tensor, Tensor]:
    """Random ones: `up` [middle, hidden] and `down` [hidden, middle]."""
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(middle, hidden, generator=generator)
    down = torch.randn(hidden, middle, generator=generator)
    return up * (2 / hidden) ** 0.5, down / middle**0.5


def clock(work: Work, x: Tensor, num_ranks: int = 2) -> None:
    """Prints what each rank does for a token."""
    _, turns = run(work, x, num_ranks)
    best = fastest(turns)
    print(f"{work.__name__}: {1e3 * best[0].seconds:.1f} ms per token")
    for i, turn in enumerate(best):
        waits = 1e3 * turn.seconds_waited
        computes = 1e3 * turn.seconds - waits
        print(f"    rank {i} computes {computes:.1f} ms and waits {waits:.1f} ms")


def run(
    work: Work, x: Tensor, num_ranks: int = 2, num_tokens: int = 30
) -> tuple[list[Tensor], list[Turns]]:
    """What each rank has after this number of tokens, each from the one before; and for each token, what
    each rank has done."""
    queues: list[Queue] = [Queue(), Queue()]
    ranks = [Rank(i, queues[i], queues[1 - i]) for i in range(num_ranks)]
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_ranks) as pool:
            futures = [pool.submit(compute, work, rank, x, num_tokens) for rank in ranks]
            results = [future.result() for future in futures]
    finally:
        torch.set_num_threads(num_threads)
    turns = zip(*(turns for _, turns in results))
    return [y for y, _ in results], [*map(list, turns)]


@torch.inference_mode()
def compute(work: Work, rank: Rank, x: Tensor, num_tokens: int) -> tuple[Tensor, list[Turn]]:
    """The thread of a rank. Returns what it has in the end, and its turns."""
    torch.set_num_threads(1)
    turns = []
    for _ in range(num_tokens):
        rank.waits = []
        begin = time.perf_counter()
        x = work(rank, x)
        turns.append(Turn(begin, time.perf_counter(), rank.waits))
    return x, turns


def fastest(turns: list[Turns]) -> Turns:
    """Those of the token that took the least time: no other program had the processor."""
    return min(turns[1:], key=lambda ranks: max(turn.seconds for turn in ranks))
