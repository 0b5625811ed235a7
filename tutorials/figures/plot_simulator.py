"""Draws a simulated run by two clocks, and how long first tokens take over the rate of arrivals.

    python -m tutorials.figures simulator_clock simulator_tail

Both are for chapter 14. Needs matplotlib.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import Job, Run, simulate
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.topics.simulator.machines import MACHINES, Machine
from tutorials.figures.fills import ORANGE, SKY
from tutorials.figures.style import (
    SMALL,
    TEXT,
    bare,
    box,
    new_figure,
    point_out,
    title,
    write,
)
from tutorials.simulation.clock import FOUR
from tutorials.simulation.metrics import summary
from tutorials.simulation.workloads import all_at_once, alpaca, gamma, poisson, workload

HEIGHT = 0.8
SERVER = Config(model="qwen3-8b", max_num_seqs=32, max_num_batched_tokens=1024)
RATES = (30, 40, 50, 60, 70, 75, 80, 85)
COUNT = 1000


class TwoMilliseconds(Machine):
    def seconds(self, *args, **kwargs) -> float:
        return 0.002


def run_of_four(machine: Machine) -> Run:
    jobs = [
        Job(asked.arrival, ((i, asked.num_prompt),), asked.num_outputs, answer=100, max_tokens=64)
        for i, asked in enumerate(FOUR, 1)
    ]
    config = Config(model=EMBEDDED_MODEL, dtype="float32", num_blocks=64, max_num_batched_tokens=98)
    return simulate(jobs, config, machine, keep_steps=True)


def draw_clock() -> Figure:
    """The four requests with a budget of 98: each step takes 2 ms, or as long as the cost model
    says."""
    figure = new_figure(7.5, 5)
    cpu = MACHINES["cpu"]
    counted, timed = figure.subplots(2, 1, sharex=True)
    draw_run(counted, run_of_four(TwoMilliseconds(cpu.hardware)))
    title(counted, "each step takes 2 ms")
    draw_run(timed, run_of_four(cpu))
    title(timed, "each step takes what the cost model says")
    timed.set_xlabel("milliseconds")
    return figure


def draw_run(axes: Axes, run: Run) -> None:
    """A row for each request; a box for each step that computes some of its tokens."""
    for number, step in enumerate(run.steps, 1):
        start = 1e3 * step.start
        length = 1e3 * (step.end - step.start)
        for i, num_tokens, is_prompt in step.items:
            box(axes, start, -i, length, HEIGHT, ORANGE if is_prompt else SKY, num_tokens)
        write(axes, start + length / 2, 1.12, number, ha="center", fontsize=SMALL)
    write(axes, -0.15, 1.12, "step", ha="right", fontsize=SMALL)
    arrival = 1e3 * FOUR[3].arrival
    axes.vlines(arrival, -3.1, -2.1, color="black", linewidth=1.2, linestyle=":")
    point_out(axes, "late arrives", (arrival, -2.6), (2.6, -2.6), ha="center")
    axes.set_yticks([HEIGHT / 2 - i for i in range(len(FOUR))], [asked.name for asked in FOUR])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks(range(0, 17, 2))
    axes.set_xlim(-0.1, 16.1)
    axes.set_ylim(-3.2, 1.35)
    bare(axes, ["left", "bottom"])
    axes.spines["left"].set_visible(False)


def tails() -> dict[str, list[float]]:
    """For each kind of arrivals, the p99 of the TTFT in ms at each rate."""
    kinds = {"in bursts": lambda rate: gamma(rate, cv=4), "Poisson process": poisson}
    return {name: [p99_of(arrivals(rate)) for rate in RATES] for name, arrivals in kinds.items()}


def p99_of(arrivals) -> float:
    run = simulate(workload(arrivals, alpaca(), COUNT), SERVER)
    return 1e3 * summary(run)["ttft"]["p99"]


def draw_tail() -> Figure:
    """Two lines, and the capacity."""
    figure = new_figure(6.5, 3.6)
    axes = figure.subplots()
    found = tails()
    for (name, values), style in zip(found.items(), ("s--", "o-")):
        axes.plot(RATES, values, style, color="black", linewidth=1, markersize=4, label=name)
    axes.text(51, 300, "in bursts", ha="right", fontsize=TEXT)
    axes.text(58, 45, "Poisson process", ha="center", fontsize=TEXT)
    whole = simulate(workload(all_at_once(), alpaca(), COUNT), SERVER)
    capacity = COUNT / whole.seconds
    axes.vlines(capacity, 0, 650, color="0.5", linewidth=1, linestyle=":")
    axes.text(
        capacity - 0.6, 610, f"capacity: {capacity:.0f} per second", ha="right", fontsize=TEXT
    )
    axes.set_xlim(28, 88)
    axes.set_ylim(0, 680)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("TTFT p99, ms")
    bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"simulator_clock": draw_clock, "simulator_tail": draw_tail}
