"""Draws the ten jobs of chapter 16: who gains and who pays under four policies, and two of these runs
by the clock.

    python -m tutorials.figures policies policies_clock

Needs matplotlib, no torch.
"""

from collections.abc import Iterator
from itertools import groupby
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import Run
from tutorials.figures.fills import BLUE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, TEXT, bare, box, new_figure, point_out, title, write
from tutorials.simulation.metrics import states
from tutorials.simulation.policies import (
    FairByTenant,
    PromptBound,
    ShortestFirst,
    UrgentPushesOut,
)
from tutorials.simulation.ten_jobs import NAMES, first_token, longest_pause, run_ten

# --- who gains, who pays ---

PANELS = {
    "shortest answer first": ShortestFirst,
    "at most 256 tokens of prompts in a step": PromptBound,
    "turns of ann and bob": FairByTenant,
    "earliest deadline first, and it pushes out": UrgentPushesOut,
}


def draw_policies() -> Figure:
    before = run_ten()
    figure = new_figure(8.5, 8)
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (name, scheduler_cls) in zip(panels, PANELS.items()):
        draw_changes(axes, name, before, run_ten(scheduler_cls))
    figure.supylabel("first token, compared with first come, first served (ms)", fontsize=TEXT)
    return figure


def draw_changes(axes: Axes, name: str, before: Run, after: Run) -> None:
    """A bar for each job: upwards if its first token comes later."""
    times = [[first_token(request) for request in run.requests] for run in (before, after)]
    for i, (one, other) in enumerate(zip(*times)):
        change = other - one
        box(axes, i + 0.1, min(change, 0), 0.8, abs(change), BLUE if change > 0 else SKY)
        y, align = (change + 10, "bottom") if change > 0 else (change - 10, "top")
        write(
            axes,
            i + 0.5,
            y,
            f"{change:+.0f}" if round(change) else "0",
            ha="center",
            va=align,
            fontsize=SMALL,
        )
    axes.hlines(0, 0, len(NAMES), color="black", linewidth=0.8)
    axes.set_xlim(0, len(NAMES))
    axes.set_ylim(-400, 190)
    axes.set_yticks([-300, 0])
    bare(axes, ["left", "bottom"])
    axes.set_xticks([i + 0.5 for i in range(len(NAMES))], NAMES, fontsize=TEXT)
    axes.tick_params(axis="x", length=0)
    means = [mean(row) for row in times]
    pauses = [longest_pause(run.requests) for run in (before, after)]
    title(
        axes,
        f"{name}: mean {means[0]:.0f} to {means[1]:.0f} ms, "
        f"longest pause {pauses[0]:.0f} to {pauses[1]:.0f} ms",
    )


# --- by the clock ---

HEIGHT = 0.8
DRAWN: dict[str, tuple[Fill, float]] = {  # what `states` says: fill, height
    "#": (BLUE, HEIGHT),
    "o": (SKY, HEIGHT),
    "x": (WASTE, HEIGHT),
    ".": (BLUE, 0.06),
    "-": (BLUE, 0.06),
}


def draw_clock() -> Figure:
    """First come, first served by steps and by the clock, and what pushing out makes of it."""
    fcfs, pushes_out = run_ten(), run_ten(UrgentPushesOut)
    figure = new_figure(8.5, 10)
    by_steps, by_time, pushed = figure.subplots(3, 1)
    draw_run(by_steps, fcfs, by="steps")
    num_steps = sum((4, True) in kinds(step) for step in fcfs.steps)
    text = f"E's prompt is {num_steps} of {len(fcfs.steps)}"
    title(by_steps, f"first come, first served, by steps: {text}")
    write(by_steps, 12, middle("A"), "answer", SKY, ha="center", fontsize=SMALL)
    write(by_steps, 6.5, middle("E"), "prompt", BLUE, ha="center", fontsize=SMALL)
    write(by_steps, 10, middle("F") - 0.45, "waits", ha="center", fontsize=SMALL)
    draw_run(by_time, fcfs)
    title(by_time, f"the same by the clock: E's prompt is {prompt_share(fcfs):.0%} of the time")
    wait = first_token(fcfs.requests[9])
    write(by_time, 430, middle("J"), f"{wait:.0f} ms to the first token", fontsize=SMALL)
    draw_run(pushed, pushes_out)
    title(pushed, "earliest deadline first, and it pushes out")
    text = "G comes, and E gives up its seat (hatched: it has none)"
    at = (90, middle("E") - HEIGHT / 2)
    point_out(pushed, text, at, (140, middle("G")), ha="left", fontsize=SMALL)
    write(pushed, 130, middle("J"), "J comes, and has a seat at once", fontsize=SMALL)
    return figure


def prompt_share(run: Run) -> float:
    """The time of the steps that compute tokens of E's prompt, of the whole."""
    spans = [step.end - step.start for step in run.steps if (4, True) in kinds(step)]
    return sum(spans) / run.seconds


def kinds(step) -> set[tuple[int, bool]]:
    return {(i, is_prompt) for i, _, is_prompt in step.items}


def middle(name: str) -> float:
    return -NAMES.index(name)


def draw_run(axes: Axes, run: Run, by: str = "ms") -> None:
    """A row for each job, the first one at the top."""
    edges = [1000 * step.start for step in run.steps] + [1000 * run.steps[-1].end]
    if by == "steps":
        edges = [*range(len(run.steps) + 1)]
    for i, row in states(run).items():
        for state, first, last in stretches(row):
            if state != " ":
                fill, height = DRAWN[state]
                begin, end = edges[first], edges[last]
                if state == "." and by == "ms":
                    begin = 1000 * run.requests[i].arrival
                box(axes, begin, -i - height / 2, end - begin, height, fill)
    axes.set_xlim(0, 52 if by == "steps" else 540)
    axes.set_ylim(0.4 - len(NAMES), 0.6)
    bare(axes, ["bottom"])
    axes.set_yticks([-i for i in range(len(NAMES))], NAMES, fontsize=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step" if by == "steps" else "milliseconds", fontsize=TEXT)


def stretches(row: str) -> Iterator[tuple[str, int, int]]:
    """What a job does, from which step on, and up to which."""
    first = 0
    for state, cells in groupby(row):
        last = first + len([*cells])
        yield state, first, last
        first = last


FIGURES = {"policies": draw_policies, "policies_clock": draw_clock}
