"""Calibration: short runs of the real engine, and a cost model of five constants that fits them."""

import random
import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

from nanovllm import LLM
from nanovllm.simulator import Job, Run
from nanovllm.simulator.cost_model import Hardware, Items, Machine, Shape, work_of
from tutorials.performance.machine import seconds_of
from tutorials.performance.steps import Step
from tutorials.simulation.recording import record
from tutorials.simulation.workloads import all_at_once, workload

Options = dict[str, Any]  # fields of Config
# of the engine and of the simulator, unless a case has others
OPTIONS: Options = {"dtype": "float32", "max_num_batched_tokens": 1024, "num_blocks": 4000}
SWAP: Options = {"preemption_mode": "swap", "swap_gib": 0.05}


# --- the cost model ---

TERMS = ("step", "sequence", "chunk", "byte", "flop")


def amounts(shape: Shape, items: Items, sampled: int) -> list[float]:
    """How much of each of `TERMS` a step has. The weights are left out: each step reads them, so
    they are in "step"."""
    work, chunks = work_of(shape, items, sampled), sum(n > 1 for n, _ in items)
    return [1, len(items), chunks, work.kv_bytes, work.flops]


@dataclass(frozen=True)
class Calibrated(Machine):
    """A machine that does one thing after the other: its times add up.

    `Machine` takes the larger one of reading and computing, because a GPU does both at the same
    time. One thread of a CPU does not: attention, which reads the KV cache, and the products, which
    compute, are different operations. A chunk is a sequence that computes more than one token. It
    costs more, since attention computes chunks one by one.
    """

    costs: tuple[float, ...] = (0.0,) * len(TERMS)  # seconds per unit of each of `TERMS`

    def seconds(self, shape: Shape, items: Items, num_sampled: int, **moves: int) -> float:
        parts = zip(self.costs, amounts(shape, items, num_sampled))
        swapping = self.swap_seconds(shape, moves["num_swaps"], moves["block_size"])
        return sum(cost * amount for cost, amount in parts) + swapping


def fit(rows: list[list[float]], seconds: list[float]) -> tuple[float, ...]:
    """Seconds per unit of each column, none of them below 0. It makes the mean of |relative error|
    as small as it can.

    Weighted least squares, again and again: what is far off counts less in the next round. Then a
    step in which the computer did something else has little weight.
    """
    table, target = np.array(rows, dtype=float), np.array(seconds)
    scale, used = table.max(axis=0).clip(min=1e-300), np.ones(table.shape[1], dtype=bool)
    table, weight = table / scale / target[:, None], np.ones(len(target))
    while True:
        for _ in range(50):
            costs = np.zeros(len(used))
            costs[used] = np.linalg.lstsq(table[:, used] * weight[:, None], weight, rcond=None)[0]
            weight = np.abs(table @ costs - 1).clip(min=1e-3) ** -0.5
        if (costs >= 0).all():
            return tuple(float(cost) for cost in costs / scale)
        used &= costs >= 0


def fit_larger(rows: list[list[float]], seconds: list[float]) -> tuple[float, ...]:
    """The same for `Machine`, which counts only the larger one of the last two terms: bytes and
    FLOPs."""
    costs = fit(rows, seconds)
    for _ in range(20):
        costs = fit([without_the_smaller(row, costs) for row in rows], seconds)
    return costs


def without_the_smaller(row: list[float], costs: tuple[float, ...]) -> list[float]:
    *others, num_bytes, flops = row
    return (
        [*others, num_bytes, 0.0]
        if num_bytes * costs[-2] > flops * costs[-1]
        else [*others, 0.0, flops]
    )


def fit_error(rows: list[list[float]], seconds: list[float], costs: tuple[float, ...]) -> float:
    """The mean over the steps of |relative error|."""
    guesses = [sum(cost * amount for cost, amount in zip(costs, row)) for row in rows]
    return mean(abs(guess / real - 1) for guess, real in zip(guesses, seconds))


# --- calibration ---

CELLS = [
    (batch, prompt) for batch in (1, 2, 4, 8, 16, 32, 64) for prompt in (16, 64, 200, 600, 1000)
]


class ProcessorTime:
    """A clock that stands still while other programs run, and jumps over every pause: for a
    computer that is busy."""

    def __init__(self):
        self.slept = 0.0

    def clock(self) -> float:
        return time.process_time() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


class TimeOfDay:
    """What a user's clock shows."""

    clock, sleep = staticmethod(time.perf_counter), staticmethod(time.sleep)


Watch = ProcessorTime | TimeOfDay


def play(jobs: list[Job], options: Options, watch: Watch) -> tuple[Run, list[Step]]:
    """In a new engine, whose cache is empty."""
    return record(LLM(device="cpu", **OPTIONS | options), jobs, watch.clock, watch.sleep)


def calibration_steps(seed: int, largest: int, watch: Watch) -> list[Step]:
    """Steps of short runs, one after the other in random order: for each of `CELLS`, up to about
    `largest` tokens, so many requests come in the same moment, with prompts of one token to twice
    the mean and up to 12 tokens to answer.

    Equal lengths would be too good to be true: attention pads the contexts that it computes
    together.
    """
    rng, steps = random.Random(seed), list[Step]()
    cells = [(batch, prompt) for batch, prompt in CELLS if batch * prompt <= largest]
    for batch, prompt in rng.sample(cells, len(cells)):
        lengths = [(rng.randint(1, 2 * prompt), rng.randint(1, 12)) for _ in range(batch)]
        steps += play(workload(all_at_once(), lengths, batch), {}, watch)[1]
    return steps


def calibrated(
    shape: Shape, steps: list[Step], host_bytes_per_second: float
) -> tuple[Calibrated, dict]:
    """The machine on which these steps ran, and how well it describes them."""
    rows = [amounts(shape, step.items, step.sampled) for step in steps]
    seconds = [step.seconds for step in steps]
    costs, larger = fit(rows, seconds), fit_larger(rows, seconds)
    chosen = [without_the_smaller(row, larger) for row in rows]
    report = {
        "steps": len(steps),
        "seconds_per": dict(zip(TERMS, costs)),
        "host_bytes_per_second": host_bytes_per_second,
        "error_of_the_sum": fit_error(rows, seconds, costs),
        "error_of_the_larger": fit_error(chosen, seconds, larger),
    }
    hardware = Hardware("this machine", 1.0, 1.0, 0.0)  # the costs say it all
    return Calibrated(hardware, host_bytes_per_second=host_bytes_per_second, costs=costs), report


def host_rate(num_blocks: int = 64) -> float:
    """Bytes per second from the KV cache to where swapped blocks wait: the median of some
    copies."""
    runner = LLM(device="cpu", **OPTIONS | SWAP).runner
    swaps, cache = {i: i for i in range(num_blocks)}, runner.host_cache
    assert cache is not None
    seconds = median(seconds_of(lambda: cache.swap_out(swaps), runner.device) for _ in range(20))
    return num_blocks * runner.shape.block_bytes / seconds
