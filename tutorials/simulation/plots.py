"""Pictures of simulated runs, drawn into a file or into given axes. Needs matplotlib, but no
display."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanovllm.options import shown
from nanovllm.simulator import Run
from tutorials.simulation.metrics import states

Target = str | PathLike | Axes

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


def gantt(run: Run, target: Target, by: str = "steps", title: str = "") -> None:
    """A row for each request in the order of arrival, against steps, or `by="seconds"` against
    time.

    By steps, the bars of prompts say how many tokens a step computes. Meant for about 10 requests
    and 40 steps.
    """
    if by not in ("steps", "seconds"):
        raise ValueError(f"by={shown(by)} is not allowed: it must be steps or seconds")
    rows = states(run)
    spans = [
        (i, 1.0) if by == "steps" else (step.start, step.end - step.start)
        for i, step in enumerate(run.steps)
    ]
    with canvas(
        target, width=max(6, 1 + 0.27 * min(len(run.steps), 80)), height=1.2 + 0.32 * len(rows)
    ) as axes:
        for y, (i, row) in enumerate(rows.items()):
            for state in set(row) - {" "}:
                color, height, _ = STATES[state]
                bars = [span for span, cell in zip(spans, row) if cell == state]
                # a white edge between steps, but not in thin lines
                width = 0.8 if height > 0.5 else 0
                axes.broken_barh(
                    bars,
                    (y - height / 2, height),
                    facecolor=color,
                    edgecolor="white",
                    linewidth=width,
                )
            for x, step in enumerate(run.steps if by == "steps" else []):
                if row[x] == "#":
                    num_tokens = sum(n for j, n, _ in step.items if j == i)
                    axes.text(x + 0.5, y, str(num_tokens), fontsize=6, ha="center", va="center")
        axes.set_yticks(range(len(rows)), [f"job {i}" for i in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)  # the first one at the top
        axes.set_xlim(spans[0][0], sum(spans[-1]))
        axes.set_xlabel("step" if by == "steps" else "time in seconds")
        axes.xaxis.get_major_locator().set_params(integer=by == "steps")  # there is no step 2.5
        seen = set().union(*rows.values())
        patches = [
            Patch(color=color, label=name)
            for state, (color, _, name) in STATES.items()
            if state in seen
        ]
        axes.legend(
            handles=patches,
            title=title,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            alignment="left",
            **LEGEND,
        )


@contextmanager
def canvas(target: Target, width: float, height: float) -> Iterator[Axes]:
    """The given axes, or the axes of a new figure of this size in inches, which is then saved. Without
    pyplot, which might want a display."""
    if isinstance(target, Axes):
        yield target
    else:
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure.add_subplot()
        figure.savefig(target, dpi=120)
