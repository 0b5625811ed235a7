"""Which requests wait and which run: a picture of two runs of the same load, of hundreds of requests and
thousands of steps. Needs matplotlib, but no display.

Single steps are printed by gantt_text of tutorials/simulation/metrics.py.
"""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanovllm import Run
from tutorials.simulation.metrics import spans, states

STATES = {  # what `states` says: color, height in rows, name
    "#": ("#E69F00", 0.8, "prompt"),
    "o": ("#56B4E9", 0.8, "decode"),
    ".": ("#999999", 0.08, "waits"),
    "x": ("#D55E00", 0.2, "preempted"),
    "-": ("#0072B2", 0.08, "no part in the step"),
}
LEGEND = {
    "ncol": len(STATES),
    "frameon": False,
    "fontsize": "small",
    "borderaxespad": 0.2,
    "columnspacing": 1.2,
}


def chosen(indices: list[int], which: slice) -> list[int]:
    """`which` has a start: these places. Otherwise so many of all, evenly spread."""
    if which.start is not None:
        return indices[which]
    count = min(which.stop, len(indices))
    return [indices[i * len(indices) // count] for i in range(count)]


def rows_of(run: Run) -> dict[int, tuple[str, Run]]:
    """For each request, in the order of arrival: its states, and the run whose steps they are. That
    is the run of its replica, if there are several."""
    parts = run.replicas or [run]
    rows = {
        i: (row, part)
        for name, part in enumerate(parts)
        for i, row in states(part).items()
        if run.requests[i].replica == name
    }
    return {i: rows[i] for i in sorted(rows, key=lambda i: run.requests[i].arrival)}


def draw(runs: Mapping[str, Run], path: Path, which: slice, title: str) -> None:
    """The runs side by side, with the same requests in the same rows, in the order of arrival."""
    rows = {name: rows_of(run) for name, run in runs.items()}
    indices = chosen([*next(iter(rows.values()))], which)
    figure = Figure(figsize=(13, 1.4 + 0.16 * len(indices)), layout="constrained")
    all_axes = figure.subplots(1, len(runs), sharex=True, sharey=True)
    for axes, name in zip(all_axes, runs):
        for y, i in enumerate(indices):
            draw_row(axes, y, *rows[name][i])
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("time in seconds")
    first = all_axes[0]
    first.set_yticks(range(len(indices)), map(str, indices), fontsize=7)
    first.set_ylim(len(indices) - 0.4, -0.6)  # the first one at the top
    first.set_ylabel("request")
    seen = {state for of_run in rows.values() for i in indices for state in of_run[i][0]}
    figure.legend(
        handles=[Patch(color=STATES[s][0], label=STATES[s][2]) for s in STATES if s in seen],
        title=title,
        loc="outside upper left",
        alignment="left",
        **LEGEND,
    )
    figure.savefig(path, dpi=120)


def draw_row(axes: Axes, y: int, row: str, run: Run) -> None:
    of_state: dict[str, list[tuple[float, float]]] = {state: [] for state in reversed(STATES)}
    for state, begin, end in spans(row, run.steps):
        of_state[state].append((begin, end - begin))
    for state, bars in of_state.items():  # prompts last: they are short, and would be hidden
        color, height, _ = STATES[state]
        axes.broken_barh(
            bars, (y - height / 2, height), facecolor=color, edgecolor=color, linewidth=0.6
        )
