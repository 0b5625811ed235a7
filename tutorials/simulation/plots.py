"""Pictures of simulated runs. Needs matplotlib, but no display.

Each function draws into a file (then it returns the new figure) or into given axes (then it returns their figure).
"""

from collections.abc import Mapping, Sequence
from os import PathLike

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanovllm.options import is_number, shown
from nanovllm.simulator import Run
from tutorials.simulation.metrics import states

Target = str | PathLike | Axes

PROMPT, DECODE, WAITING, PREEMPTED = "#E69F00", "#56B4E9", "#999999", "#D55E00"
STATES = {  # what `states` says: color, height in rows, name
    "#": (PROMPT, 0.8, "prompt"),
    "o": (DECODE, 0.8, "decode"),
    ".": (WAITING, 0.08, "waits"),
    "x": (PREEMPTED, 0.2, "preempted, waits"),
    "-": (DECODE, 0.08, "runs, but not in this step"),
}


def gantt(run: Run, target: Target, by: str = "steps", title: str = "") -> Figure:
    """A row for each request in the order of arrival, against steps, or `by="seconds"` against time.

    By steps, the bars of prompts say how many tokens a step computes. Meant for about 10 requests and 40 steps.
    """
    if by not in ("steps", "seconds"):
        raise ValueError(f"by={shown(by)} is not allowed: it must be steps or seconds")
    rows = states(run)
    spans = [(i, 1) if by == "steps" else (step.start, step.end - step.start) for i, step in enumerate(run.steps)]
    figure, axes = canvas(target, width=2 + 0.27 * min(len(run.steps), 80), height=1.2 + 0.32 * len(rows))
    for y, row in enumerate(rows.values()):
        for state in set(row) - {" "}:
            color, height, _ = STATES[state]
            bars = [span for span, cell in zip(spans, row) if cell == state]
            edge = {"edgecolor": "white", "linewidth": 0.8} if height > 0.5 else {}
            axes.broken_barh(bars, (y - height / 2, height), facecolor=color, **edge)
    place = {i: y for y, i in enumerate(rows)}
    for x, step in enumerate(run.steps if by == "steps" else []):
        for i, num_tokens, _ in step.items:
            if rows[i][x] == "#":
                axes.text(x + 0.5, place[i], str(num_tokens), fontsize=6, ha="center", va="center")
    axes.set_yticks(range(len(rows)), [f"job {i}" for i in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first one at the top
    axes.set_xlim(spans[0][0], sum(spans[-1]))
    axes.set_xlabel("step" if by == "steps" else "time in seconds")
    seen = set().union(*rows.values())
    patches = [Patch(color=color, label=name) for state, (color, _, name) in STATES.items() if state in seen]
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
    axes.legend(handles=patches, title=title, ncol=len(STATES), frameon=False, **above)
    return finished(figure, target)


def latency_over_rate(
    curves: Mapping[str, Sequence[tuple[float, float | None]]],
    target: Target,
    cap: float = 1.0,
    log: bool = False,
    title: str = "",
) -> Figure:
    """A line of (requests per second, normalized latency in seconds per token) for each system, as in figure 12 of the
    PagedAttention paper. What is above `cap` is cut off."""
    if not (is_number(cap, 0) and cap > 0):
        raise ValueError(f"cap={shown(cap)} is not allowed: it must be a positive number")
    figure, axes = canvas(target, width=5, height=3.5)
    for (name, points), marker in zip(curves.items(), "os^Dv*PX<>" * len(curves)):
        present = sorted((rate, latency) for rate, latency in points if latency is not None)
        if present:
            axes.plot(*zip(*present), marker=marker, markersize=4, label=name)
    if log:
        axes.set_yscale("log")
    axes.set_ylim(None if log else 0, cap)
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("normalized latency (s/token)")
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small")
    return finished(figure, target)


def canvas(target: Target, width: float, height: float) -> tuple[Figure, Axes]:
    """The given axes, or those of a new figure of this size in inches. Without pyplot, which might want a display."""
    if isinstance(target, Axes):
        return target.figure, target
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def finished(figure: Figure, target: Target) -> Figure:
    if not isinstance(target, Axes):
        figure.savefig(target, dpi=120)
    return figure
