"""Workloads at a share of the capacity, for the simulator and the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm import Job, Run, simulate
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.topics.simulator.machines import Machine
from tutorials.simulation.workloads import (
    Arrivals,
    Lengths,
    all_at_once,
    gamma,
    lognormal,
    shared_prefix,
    workload,
)

Options = dict[str, Any]  # fields of Config
# of the engine and of the simulator, unless a case has others
OPTIONS: Options = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 1024,
    "num_blocks": 4000,
}
SWAP: Options = {"preemption_mode": "swap", "swap_gib": 0.05}
Build = Callable[[Arrivals, int], list[Job]]


def chats() -> Lengths:
    return lognormal(100, 50, max_model_len=1000)


def plain(lengths: Callable[[], Lengths]) -> Build:
    return lambda arrivals, count: workload(arrivals, lengths(), count)


def documents(arrivals: Arrivals, count: int) -> list[Job]:
    return shared_prefix(arrivals, chats(), count, num_prefixes=4, prefix_tokens=400)


@dataclass(frozen=True)
class Case:
    """A workload at a share of the capacity; None: all at once."""

    build: Build
    load: float | None
    options: Options = field(default_factory=dict)


def simulated(jobs: list[Job], case: Case, machine: Machine) -> Run:
    return simulate(jobs, Config(model=EMBEDDED_MODEL, **OPTIONS | case.options), machine)


def jobs_of(case: Case, machine: Machine, seconds: float) -> list[Job]:
    """Jobs for about this number of seconds. The simulator says what the capacity is."""
    sample = 200
    capacity = sample / simulated(case.build(all_at_once(), sample), case, machine).seconds
    rate = capacity * (case.load or 1.0)
    count = max(10, round(rate * seconds))
    arrivals = all_at_once() if case.load is None else gamma(rate, cv=1)
    return case.build(arrivals, count)
