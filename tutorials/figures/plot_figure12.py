"""Draws figure 12 of the PagedAttention paper, simulated: latency over the request rate.

    python -m tutorials.figures figure12

Reads tutorials/results/figure12.json. Needs matplotlib.
"""

import json
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorials.figures.fills import BLUE, GREEN, ORANGE
from tutorials.figures.style import HERE, SMALL, TEXT, bare, new_figure, title

RESULT = HERE.parent / "results" / "figure12.json"
LIMIT = 1.0  # seconds per token: the paper's, above which a system does not sustain the load
LINES = {  # how each system's line looks
    "paged": (BLUE.color, "o-"),
    "paged, prompts first": (BLUE.color, "*--"),
    "Orca (Oracle)": (GREEN.color, "s-"),
    "Orca (Pow2)": (GREEN.color, "^--"),
    "Orca (Max)": (ORANGE.color, "D-"),
    "static batching": ("black", "v:"),
}
# at which latency the name of each stands, on the left or on the right of its line
PLACES = (
    {
        "static batching": (0.55, "right"),
        "Orca (Max)": (0.66, "right"),
        "Orca (Pow2)": (0.78, "left"),
        "Orca (Oracle)": (0.5, "right"),
        "paged, prompts first": (0.62, "left"),
        "paged": (0.4, "right"),
    },
    {
        "static batching": (0.8, "left"),
        "Orca (Max)": (0.8, "left"),
        "paged, prompts first": (0.9, "left"),
        "Orca (Pow2)": (0.28, "right"),
        "Orca (Oracle)": (0.41, "right"),
        "paged": (0.54, "right"),
    },
)


def draw(report: dict) -> Figure:
    """The loads side by side, each line up to its first point above the limit."""
    loads = report["figure12"]
    figure = new_figure(5 * len(loads), 4)
    all_axes = figure.subplots(1, len(loads), squeeze=False)[0]
    for axes, (name, results), places in zip(all_axes, loads.items(), PLACES):
        for system, result in results.items():
            points = [(point["rate"], point["latency"]) for point in result["points"]]
            num_below = sum(latency < LIMIT for _, latency in points)
            draw_line(axes, system, points[: num_below + 1], *places[system])
        title(axes, name)
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        axes.set_ylim(0, LIMIT)
        axes.set_xlabel("requests per second", fontsize=TEXT)
        bare(axes, ["left", "bottom"])
    all_axes[0].set_ylabel("normalized latency (s/token)", fontsize=TEXT)
    return figure


def draw_line(
    axes: Axes, name: str, points: list[tuple[float, float]], height: float, side: str
) -> None:
    """A line, with its name beside it at this height."""
    label = name.replace(", ", ",\n").replace(" (", "\n(").replace("static ", "static\n")
    color, style = LINES[name]
    axes.plot(*zip(*points), style, color=color, markersize=4, label=label)
    space = 4 if side == "right" else -4
    axes.annotate(
        label,
        (rate_at(points, height), height),
        (space, 0),
        textcoords="offset points",
        ha="left" if side == "right" else "right",
        va="top" if side == "right" else "bottom",
        fontsize=SMALL,
    )


def rate_at(points: list[tuple[float, float]], latency: float) -> float:
    """Where a line reaches this latency; its end if it does not."""
    for (rate, low), (next_rate, high) in pairwise(points):
        if low <= latency <= high:
            return rate + (next_rate - rate) * (latency - low) / (high - low)
    return points[-1][0]


def draw_figure12() -> Figure:
    return draw(json.loads(RESULT.read_bytes()))


FIGURES = {"figure12": draw_figure12}
