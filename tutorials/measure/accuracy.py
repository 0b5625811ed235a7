"""How wrong is the simulator? The same jobs in the real engine and in the simulator, side by side.

    OMP_NUM_THREADS=1 python -m tutorials.measure.accuracy --json tutorials/results/simulator_error.json

The engine runs the embedded model in float32 on one thread of this CPU. The simulator runs the same
scheduler and block manager; only the time of a step is a guess. So its error is the error of the
cost model, and what follows from it.

1. Calibration: short runs of random requests, which are none of the workloads below, give the time
   of many steps. The constants of a machine are fitted to them (calibrate.py).
2. Each workload is played several times, and simulated once. The workloads take turns, and after
   each of them a part of the calibration is repeated, because a computer is not equally fast all
   day.
3. The difference between the real runs themselves is the noise. No simulator can have a smaller
   error than that.

Rates are chosen as a share of the capacity, which is the throughput if all requests are there from
the start. Near 100 % the queue grows, and a small error of the time per step becomes a large one of
the waiting time.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean, median

import torch

from nanovllm import Run
from nanovllm.topics.simulator.machines import Machine
from tutorials.arguments import duration, experiment, positive
from tutorials.machine import device_name, environment, installed
from tutorials.measure import pairs
from tutorials.measure.calibrate import (
    ON_CPU,
    OPTIONS,
    SWAP,
    Cells,
    ProcessorTime,
    TimeOfDay,
    Watch,
    calibrated,
    calibration_steps,
    new_engine,
    play,
    shape_of_model,
    start_of,
    warm_up,
)
from tutorials.measure.cases import CASES, Case, jobs_of, simulated
from tutorials.measure.steps import Step
from tutorials.report import markdown, rows_of, write_json
from tutorials.simulation.metrics import distribution, tpot, ttft

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


def totals(rows: dict[str, dict]) -> dict[str, dict]:
    """For each metric, and for all but the total time, which arrivals decide: mean error of the
    simulator, mean and worst |error|, and the noise of reality."""
    errors = {metric: [error(row, metric) for row in rows.values()] for metric in METRICS}
    noises = {
        metric: [n for row in rows.values() if (n := pairs.noise(row["real"], metric)) is not None]
        for metric in METRICS
    }
    for kind in (errors, noises):
        kind["all"] = [x for metric, values in kind.items() if metric != "seconds" for x in values]
    return {
        metric: {
            "signed_error": mean(errors[metric]),
            "mean_error": mean(map(abs, errors[metric])),
            "worst_error": max(map(abs, errors[metric])),
            "mean_noise": mean(noises[metric]) if noises[metric] else None,
            "worst_noise": max(noises[metric], default=None),
        }
        for metric in errors
    }


def table(rows: dict[str, dict]) -> str:
    """Markdown: real, simulated and the error, for each workload and metric."""
    lines = [["", "requests", *(f"{name}: real, simulated (s)" for name in METRICS.values())]]
    for name, row in rows.items():
        cells = [
            f"{median(r[m] for r in row['real']):.3g}, {row['simulated'][m]:.3g} ({error(row, m):+.0%})"
            for m in METRICS
        ]
        lines.append([name, f"{row['requests']:,}", *cells])
    return markdown(lines)


def rows(report: dict) -> list[list[str]]:
    """How far the simulator is from real runs, over all loads."""
    found = {
        METRICS.get(name, "all but the total time"): row
        for name, row in totals(report["workloads"]).items()
    }
    columns = [("signed_error", "+.1%")]
    columns += [(key, ".1%") for key in ("mean_error", "worst_error", "mean_noise")]
    return rows_of("|error with its sign|error|the largest|between real runs", columns, found)


CELLS_BETWEEN = 6  # after each run that is compared


class Meter:
    """Fits the machine to steps of runs between the runs that are compared: a computer is not equally
    fast all day."""

    def __init__(self, watch: Watch, cells: Cells):
        self.watch = watch
        self.cells = cells
        self.llm = new_engine(SWAP)
        warm_up(self.llm, watch)
        self.start = start_of(self.llm)
        self.steps: list[Step] = []

    def run(self, count: int | None = None) -> None:
        """Runs all cells once more, or at most this number of them."""
        seed = len(self.steps)
        self.steps += calibration_steps(self.llm, seed, self.cells, self.watch, count)

    def run_some(self) -> None:
        self.run(CELLS_BETWEEN)

    def machine(self) -> tuple[Machine, dict]:
        """What fits best so far, and a report."""
        machine, errors = calibrated(shape_of_model({}), self.steps, self.start)
        report = {"machine": asdict(machine), "steps": len(self.steps), "errors": errors}
        return machine, report


Measures = Callable[[Run], dict[str, float | None]]


def compare(
    cases: dict[str, Sequence[Case]], measures: Measures, seconds: float, repeat: int, meter: Meter
) -> tuple[dict, dict[str, dict]]:
    """Calibrates and measures in turns, then simulates. Cases of one name have the same jobs, and
    every other turn plays them the other way round. A row has the real runs of each case, and its
    simulation."""
    meter.run()
    first, _ = meter.machine()
    jobs = {name: jobs_of(same[0], first, seconds) for name, same in cases.items()}
    real: dict[str, list[list[dict]]] = {name: [[] for _ in same] for name, same in cases.items()}
    for turn in range(repeat):
        for name, same in cases.items():
            print(f"turn {turn + 1} of {repeat}: {name}", flush=True)
            pairs_of_case = list(zip(same, real[name]))
            for case, runs in pairs_of_case if turn % 2 == 0 else reversed(pairs_of_case):
                runs.append(measures(play(jobs[name][0], case.options, meter.watch)[0]))
            meter.run_some()
    machine, report = meter.machine()
    rows = {}
    for name, same in cases.items():
        own, rate = jobs[name]
        guesses = [measures(simulated(own, case, machine)) for case in same]
        rows[name] = {"requests": len(own), "rate": rate, "real": real[name], "simulated": guesses}
    return report, rows


def of_workloads(cases: dict[str, Case], seconds: float, repeat: int, meter: Meter) -> dict:
    """One case of each name."""
    alone = {name: [case] for name, case in cases.items()}
    machine, rows = compare(alone, measures, seconds, repeat, meter)
    for name, row in rows.items():
        row["load"] = cases[name].load
        (row["real"],) = row["real"]
        (row["simulated"],) = row["simulated"]
    return {"machine": machine, "totals": totals(rows), "workloads": rows}


def of_policies(chosen: list[pairs.Pair], seconds: float, repeat: int, meter: Meter) -> dict:
    """Two cases of each name: policies on identical jobs."""
    cases = {pair.name: pair.cases for pair in chosen}
    machine, rows = compare(cases, pairs.numbers, seconds, repeat, meter)
    return {"machine": machine, "totals": pairs.totals(rows), "pairs": rows}


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument(
        "--seconds", type=duration, default=12, help="how long each workload takes, about"
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, help="how often each is played in real time"
    )
    parser.add_argument("--policies", action="store_true", help="compare pairs of policies")
    parser.add_argument("--guesses", action="store_true", help="compare pairs with and without")
    parser.add_argument("--load", type=float, help="only those pairs with this load, such as 0.9")
    parser.add_argument(
        "--largest", type=positive, default=20_000, help="tokens of the largest calibration run"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="for a computer that others use meanwhile"
    )
    args = parser.parse_args()
    known = pairs.GUESSES if args.guesses else pairs.PAIRS
    chosen = [pair for pair in known if args.load in (None, pair.case.load)]
    if not chosen:
        parser.error(f"--load {args.load:g} is not allowed: no pair has this load")
    of_pairs = args.policies or args.guesses
    if of_pairs and args.repeat < 2:
        parser.error("--repeat 1 is not allowed: only 2 turns or more show how far they differ")
    torch.set_num_threads(1)
    versions = {name: installed(name) for name in ("torch", "transformers")}
    report = environment() | {
        "device": device_name(torch.device("cpu")),
        "versions": versions,
        "options": OPTIONS,
    }
    watch = ProcessorTime() if args.processor_time else TimeOfDay()
    report |= {"clock": type(watch).__name__, "seconds": args.seconds, "repeat": args.repeat}
    meter = Meter(watch, ON_CPU._replace(most_tokens=args.largest))
    if of_pairs:
        report |= of_policies(chosen, args.seconds, args.repeat, meter)
        text = pairs.table(report["pairs"])
    else:
        report |= of_workloads(CASES, args.seconds, args.repeat, meter)
        text = f"{table(report['workloads'])}\n\n{markdown(rows(report))}"
    print(f"\n{text}\n\n{json.dumps(report['machine'], indent=1)}")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
