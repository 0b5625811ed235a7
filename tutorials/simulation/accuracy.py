"""How wrong is the simulator? The same jobs in the real engine and in the simulator, side by side.

    OMP_NUM_THREADS=1 python -m tutorials.simulation.accuracy --json tutorials/results/simulator_error.json \
        --picture tutorials/figures/simulator_error.png

The engine runs the embedded model in float32 on one thread of this CPU. The simulator runs the same
scheduler and block manager; only the time of a step is a guess. So its error is the error of the
cost model, and what follows from it.

1. Calibration: short runs of random requests, which are none of the workloads below, give the time of many steps. A
   cost model with five constants is fitted to them.
2. Each workload is played several times in real time, and simulated once. The workloads take turns, and calibration
   is repeated in each turn, because a computer is not equally fast all day.
3. The difference between the real runs themselves is the noise. No simulator can have a smaller error than that.

Rates are chosen as a share of the capacity, which is the throughput if all requests are there from
the start. Near 100 % the queue grows, and a small error of the time per step becomes a large one of
the waiting time.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from nanovllm import LLM
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.roofline import Hardware, Items, Machine, Shape, shape_of, work_of
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.simulator import Job, Run, model_config, simulate
from tutorials.performance.machine import device_name, environment, installed, seconds_of
from tutorials.performance.report import markdown, write_json
from tutorials.performance.steps import Step
from tutorials.simulation.metrics import distribution, tpot, ttft
from tutorials.simulation.recording import record
from tutorials.simulation.workloads import (
    Arrivals,
    Lengths,
    all_at_once,
    fixed,
    gamma,
    labelled,
    lognormal,
    merged,
    multi_turn,
    predicted,
    shared_prefix,
    workload,
)

Options = dict[str, Any]  # fields of Config
Build = Callable[[Arrivals, int], list[Job]]
OPTIONS: Options = {
    "dtype": "float32",
    "max_num_batched_tokens": 1024,
    "num_blocks": 4000,
}  # unless a case has others


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

    def seconds(
        self,
        shape: Shape,
        items: Items,
        num_sampled: int,
        num_copies: int,
        num_swaps: int,
        block_size: int,
    ) -> float:
        parts = zip(self.costs, amounts(shape, items, num_sampled))
        seconds = sum(cost * amount for cost, amount in parts)
        return seconds + self.swap_seconds(shape, num_swaps, block_size)


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
    rows, seconds = (
        [amounts(shape, step.items, step.sampled) for step in steps],
        [step.seconds for step in steps],
    )
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


# --- workloads ---


class ShortestFirst(Scheduler):
    """By a guess of the answer's length."""

    def priority(self, request: Request) -> tuple[int, int]:
        return request.params.extra_args["predicted_tokens"], request.arrival


class FairByTenant(Scheduler):
    """Admits a request of the tenant that has the fewest running."""

    def next_waiting(self) -> Request | None:
        running = Counter(request.params.extra_args["tenant"] for request in self.running)
        return min(
            self.waiting,
            key=lambda r: (running[r.params.extra_args["tenant"]], r.arrival),
            default=None,
        )


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
    small, large = (
        workload(times[::2], chats(), len(times[::2])),
        lognormal(300, 60, max_model_len=1000),
    )
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


SWAP: Options = {"preemption_mode": "swap", "swap_gib": 0.05}
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
    """Jobs for about so many seconds, and how many arrive per second. The simulator says what the
    capacity is."""
    sample = 200
    capacity = sample / simulated(case.build(all_at_once(), sample), case, machine).seconds
    rate = capacity * (case.load or 1.0)
    count = max(10, round(rate * seconds))
    arrivals = all_at_once() if case.load is None else gamma(rate, case.cv)
    return case.build(arrivals, count), rate


# --- the comparison ---

METRICS = {
    "seconds": "total time",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "tpot_p50": "TPOT p50",
    "tpot_p99": "TPOT p99",
}


def measures(run: Run) -> dict[str, float | None]:
    """Total time, TTFT and TPOT, in seconds; and two counts."""
    first, later = distribution(map(ttft, run.requests)), distribution(map(tpot, run.requests))
    counts = {"steps": run.num_steps, "preemptions": run.num_preemptions}
    times = {
        "ttft_p50": first["p50"],
        "ttft_p99": first["p99"],
        "tpot_p50": later["p50"],
        "tpot_p99": later["p99"],
    }
    return {"seconds": run.seconds, **times, **counts}


def error(row: dict, metric: str) -> float:
    """Of the simulation, relative to the median of the real runs."""
    return row["simulated"][metric] / median(real[metric] for real in row["real"]) - 1


def noise(row: dict, metric: str) -> float | None:
    """How far a real run is from the median of the others, as a mean of |relative error|."""
    values = [real[metric] for real in row["real"]]
    if len(values) < 2:
        return None
    others = [median(values[:i] + values[i + 1 :]) for i in range(len(values))]
    return mean(abs(value / other - 1) for value, other in zip(values, others))


def totals(rows: dict[str, dict]) -> dict[str, dict]:
    """For each metric and for all: mean and worst |error| of the simulator, and the noise of
    reality."""
    errors = {metric: [abs(error(row, metric)) for row in rows.values()] for metric in METRICS}
    noises = {
        metric: [n for row in rows.values() if (n := noise(row, metric)) is not None]
        for metric in METRICS
    }
    errors["all"], noises["all"] = (
        [x for values in kind.values() for x in values] for kind in (errors, noises)
    )
    return {
        metric: {
            "mean_error": mean(errors[metric]),
            "worst_error": max(errors[metric]),
            "mean_noise": mean(noises[metric]) if noises[metric] else None,
            "worst_noise": max(noises[metric], default=None),
        }
        for metric in errors
    }


def table(rows: dict[str, dict]) -> str:
    """Markdown: real / simulated and the error, for each workload and metric; then the mean and the
    worst."""
    lines = [["", "requests", *(f"{name}: real, simulated (s)" for name in METRICS.values())]]
    for name, row in rows.items():
        cells = [
            f"{median(r[m] for r in row['real']):.3g}, {row['simulated'][m]:.3g} ({error(row, m):+.0%})"
            for m in METRICS
        ]
        lines.append([name, f"{row['requests']:,}", *cells])
    summary = totals(rows)
    for key, label in (
        ("mean_error", "mean error"),
        ("worst_error", "worst error"),
        ("mean_noise", "between real runs: mean"),
        ("worst_noise", "between real runs: worst"),
    ):
        values = [summary[metric][key] for metric in METRICS]
        lines.append([label, "", *("-" if value is None else f"{value:.1%}" for value in values)])
    return markdown(lines)


def draw(rows: dict[str, dict], path: Path) -> None:
    """Simulated over measured seconds, a dot for each workload and metric; the band is 15 % wide on
    each side."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    for (metric, name), marker in zip(METRICS.items(), "so^D*"):
        real = [median(run[metric] for run in row["real"]) for row in rows.values()]
        axes.scatter(
            real,
            [row["simulated"][metric] for row in rows.values()],
            marker=marker,
            s=22,
            label=name,
        )
    values = [
        run[metric]
        for row in rows.values()
        for run in (*row["real"], row["simulated"])
        for metric in METRICS
    ]
    ends = np.array([min(values) / 2, max(values) * 2])
    axes.plot(ends, ends, color="#999999", linewidth=1)
    axes.fill_between(
        ends, 0.85 * ends, 1.15 * ends, color="#999999", alpha=0.25, linewidth=0, label="15 %"
    )
    axes.set(
        xscale="log", yscale="log", xlabel="measured (s)", ylabel="simulated (s)", aspect="equal"
    )
    axes.set(xlim=ends, ylim=ends)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def compare(
    cases: dict[str, Case], seconds: float, repeat: int, largest: int, watch: Watch
) -> dict:
    """Calibrates and measures in turns, then simulates. What it prints is how far it is."""
    shape = shape_of(model_config(EMBEDDED_MODEL), itemsize=4)
    play(
        workload(all_at_once(), fixed(50, 20), 20), {}, watch
    )  # the first steps of a process are slow
    rate, steps = host_rate(), calibration_steps(0, largest, watch)
    first, _ = calibrated(shape, steps, rate)
    jobs = {name: jobs_of(case, first, seconds) for name, case in cases.items()}
    real: dict[str, list[dict]] = {name: [] for name in cases}
    for turn in range(repeat):
        for name, case in cases.items():
            print(f"turn {turn + 1} of {repeat}: {name}", flush=True)
            real[name].append(measures(play(jobs[name][0], case.options, watch)[0]))
        steps += calibration_steps(turn + 1, largest, watch)
    machine, report = calibrated(shape, steps, rate)
    rows = {
        name: {
            "requests": len(jobs[name][0]),
            "load": case.load,
            "rate": jobs[name][1],
            "real": real[name],
            "simulated": measures(simulated(jobs[name][0], case, machine)),
        }
        for name, case in cases.items()
    }
    return {"machine": report, "totals": totals(rows), "workloads": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=12, help="how long each workload takes, about"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="how often each is played in real time"
    )
    parser.add_argument(
        "--largest", type=int, default=20_000, help="tokens of the largest calibration run"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="for a computer that others use meanwhile"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--picture", type=Path, help="draw simulated over measured into this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: installed(name) for name in ("torch", "transformers")}
    report = environment() | {
        "device": device_name(torch.device("cpu")),
        "versions": versions,
        "options": OPTIONS,
    }
    watch = ProcessorTime() if args.processor_time else TimeOfDay()
    report |= {"clock": type(watch).__name__, "seconds": args.seconds, "repeat": args.repeat}
    report |= compare(CASES, args.seconds, args.repeat, args.largest, watch)
    print(f"\n{table(report['workloads'])}\n\n{json.dumps(report['machine'], indent=1)}")
    if args.json:
        write_json(report, args.json)
    if args.picture:
        draw(report["workloads"], args.picture)


if __name__ == "__main__":
    main()
