"""The workloads on which simulator and engine are compared: loads, policies, scarce memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from nanovllm import Job, Run, simulate
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.topics.simulator.machines import Machine
from tutorials.measure.calibrate import OPTIONS, SWAP, Options
from tutorials.simulation.policies import FairByTenant, ShortestFirst
from tutorials.simulation.workloads import (
    Arrivals,
    Lengths,
    all_at_once,
    gamma,
    labelled,
    lognormal,
    merged,
    multi_turn,
    predicted,
    shared_prefix,
    workload,
)

Build = Callable[[Arrivals, int], list[Job]]


def chats() -> Lengths:
    return lognormal(100, 50, max_model_len=1000)


def plain(lengths: Callable[[], Lengths]) -> Build:
    return lambda arrivals, count: workload(arrivals, lengths(), count)


def conversations(arrivals: Arrivals, count: int) -> list[Job]:
    return multi_turn(
        arrivals, lognormal(40, 40, max_model_len=500), count, think=0.5, max_model_len=1500
    )


def documents(arrivals: Arrivals, count: int) -> list[Job]:
    return shared_prefix(arrivals, chats(), count, num_prefixes=4, prefix_tokens=400)


def two_tenants(arrivals: Arrivals, count: int) -> list[Job]:
    times = list(islice(arrivals, count))
    small = workload(times[::2], chats(), len(times[::2]))
    large = lognormal(300, 60, max_model_len=1000)
    return merged(
        labelled(small, tenant="small"),
        labelled(workload(times[1::2], large, len(times[1::2])), tenant="large"),
    )


def mixture(arrivals: Arrivals, count: int) -> list[Job]:
    """A third each: chats, long prompts, conversations."""
    times = list(islice(arrivals, count))
    a, b, c = times[::3], times[1::3], times[2::3]
    long_prompts = workload(b, lognormal(500, 15, max_model_len=1500), len(b))
    return merged(workload(a, chats(), len(a)), long_prompts, conversations(c, len(c)))


@dataclass(frozen=True)
class Case:
    """A workload at a share of the capacity; None: all at once."""

    build: Build
    load: float | None
    cv: float = 1.0  # of the gaps between arrivals; 1: Poisson
    options: Options = field(default_factory=dict)


long_outputs = plain(lambda: lognormal(30, 250, max_model_len=1500))
CASES = {
    "light": Case(plain(chats), 0.3),
    "busy": Case(plain(chats), 0.6),
    "heavy": Case(plain(chats), 0.85),
    "bursts": Case(plain(chats), 0.6, cv=3.0),
    "all at once": Case(plain(chats), None),
    "long prompts": Case(plain(lambda: lognormal(600, 15, max_model_len=2000)), 0.6),
    "long outputs": Case(long_outputs, 0.6),
    "shared prefixes": Case(documents, 0.6),
    "conversations": Case(conversations, 0.6),
    "two tenants, fair": Case(
        two_tenants, 0.85, options={"scheduler_cls": FairByTenant, "max_num_seqs": 16}
    ),
    "shortest first": Case(
        lambda arrivals, count: predicted(workload(arrivals, chats(), count), sigma=0.5),
        0.85,
        options={"scheduler_cls": ShortestFirst, "max_num_seqs": 16},
    ),
    "scarce blocks, recompute": Case(long_outputs, None, options={"num_blocks": 160}),
    "scarce blocks, swap": Case(long_outputs, None, options={"num_blocks": 160} | SWAP),
    "64 tokens per step": Case(plain(chats), 0.6, options={"max_num_batched_tokens": 64}),
    "mixture": Case(mixture, 0.6),
}


def simulated(jobs: list[Job], case: Case, machine: Machine) -> Run:
    return simulate(jobs, Config(model=EMBEDDED_MODEL, **OPTIONS | case.options), machine)


def jobs_of(case: Case, machine: Machine, seconds: float) -> tuple[list[Job], float]:
    """Jobs for about this number of seconds, and how many arrive per second. The simulator says what the
    capacity is."""
    sample = 200
    capacity = sample / simulated(case.build(all_at_once(), sample), case, machine).seconds
    rate = capacity * (case.load or 1.0)
    count = max(10, round(rate * seconds))
    arrivals = all_at_once() if case.load is None else gamma(rate, case.cv)
    return case.build(arrivals, count), rate
