"""How fast is the simulator itself? The whole of a recorded load, in a process of its own for each
rate.

    python -m measure.simulator_speed --trace AzureLLMInferenceTrace_conv.csv \
        --json tutorials/results/simulator_speed.json

Processor time is what counts: other programs do not disturb it. The time per sequence and step is
shown for each quarter of the steps, because a step must not become slower the longer a simulation
runs.
"""

import time
from array import array
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from nanovllm.config import Config
from nanovllm.simulator import simulate
from nanovllm.simulator.cost_model import Items, Shape
from nanovllm.simulator.machines import MACHINES, Machine
from tutorials.arguments import experiment
from tutorials.machine import device_name, environment, peak_bytes
from tutorials.report import aligned, write_json
from tutorials.simulation.workloads import all_at_once, azure

ARRIVALS = ("as recorded", "16 per second", "all at once")


class Watched(Machine):
    """A machine that notes at each step what time it is, and how many sequences there are."""

    def __init__(self):
        super().__init__(MACHINES["h100"].hardware)
        self.times, self.sizes = array("d"), array("l")

    def seconds(self, shape: Shape, items: Items, **step: int) -> float:
        self.times.append(time.process_time())
        self.sizes.append(len(items))
        return super().seconds(shape, items, **step)

    def quarters(self) -> list[float]:
        """Microseconds per sequence of a step, in each quarter of the steps."""
        ends = [(len(self.times) - 1) * i // 4 for i in range(5)]
        return [
            1e6 * (self.times[end] - self.times[begin]) / sum(self.sizes[begin:end])
            for begin, end in pairwise(ends)
        ]


def measure(trace: Path, count: int | None, arrivals: str) -> dict:
    """Seconds, steps, microseconds per step and per sequence of a step, and the most memory of the
    process."""
    start, processor_start = time.perf_counter(), time.process_time()
    jobs = azure(trace, count, rate=16 if arrivals == "16 per second" else None)
    if arrivals == "all at once":
        jobs = [job._replace(time=at) for job, at in zip(jobs, all_at_once())]
    machine = Watched()
    run = simulate(jobs, Config(model="qwen3-8b"), machine)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    return {
        "requests": len(jobs),
        "simulated_seconds": run.seconds,
        "steps": run.num_steps,
        "sequences_in_a_step": sum(machine.sizes) / run.num_steps,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "us_per_step": 1e6 * processor_seconds / run.num_steps,
        "us_per_sequence_by_quarter": machine.quarters(),
        "peak_megabytes": peak_bytes() / 1e6,
    }


def rows(report: dict) -> list[list[str]]:
    header = "19,366 requests arrive|of the server|steps|sequences in a step"
    found = [f"{header}|processor time|us per step".split("|")]
    for name, run in report["runs"].items():
        seconds = run["processor_seconds"]
        found.append([
            name,
            f"{run['simulated_seconds']:,.0f} s",
            f"{run['steps']:,}",
            f"{run['sequences_in_a_step']:.0f}",
            f"{seconds:.0f} s",
            f"{seconds / run['steps'] * 1e6:,.0f}",
        ])  # fmt: skip
    return found


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    parser.add_argument("--requests", type=int, help="only the first so many")
    args = parser.parse_args()
    import torch  # only here: the simulator itself needs none of its memory

    report = environment() | {"device": device_name(torch.device("cpu"), threads=1), "runs": {}}
    for arrivals in ARRIVALS:
        with get_context("spawn").Pool(1) as pool:
            report["runs"][arrivals] = pool.apply(measure, (args.trace, args.requests, arrivals))
    print(aligned(rows(report)))
    write_json(report, args.json)


if __name__ == "__main__":
    main()
