"""Draws the experts that a batch hits, and what that does to the speed, for the second half of chapter 05.

    python -m tutorials.figures model_experts

Needs matplotlib.
"""

import json

from matplotlib.figure import Figure

from tutorials.figures.style import HERE, SMALL, bare, new_figure, title

REPORT = HERE.parent / "results" / "experts.json"
EXPERTS, TOP = 128, 8


def draw() -> Figure:
    """On the left, experts over requests: a line that is computed, and what was measured. On the right, the speed."""
    rows = {int(n): row for n, row in json.loads(REPORT.read_bytes())["requests"].items()}
    figure = new_figure(7, 3.0)
    left, right = figure.subplots(1, 2)
    steps = [2 ** (i / 8) for i in range(49)]
    hit = [EXPERTS * (1 - (1 - TOP / EXPERTS) ** n) for n in steps]
    left.plot(steps, hit, color="0.4", linewidth=1)
    left.plot([*rows], [row["experts_hit"] for row in rows.values()], "o", color="black", markersize=5)
    left.axhline(EXPERTS, color="0.7", linewidth=1)
    left.text(1, EXPERTS + 2, "all 128", fontsize=SMALL, va="bottom")
    left.text(6.2, 36, "line: computed\ndots: measured", fontsize=SMALL, va="top")
    left.set_ylim(0, 145)
    title(left, "experts of a layer that a step hits")
    speeds = {n: row["tokens_per_second"] for n, row in rows.items()}
    right.plot([*speeds], [*speeds.values()], "o-", color="black", markersize=5, linewidth=1)
    for n, speed in speeds.items():
        right.text(n, speed + 3, f"{speed:.0f}", fontsize=SMALL, ha="center", va="bottom")
    right.set_ylim(0, 78)
    title(right, "tokens per second, all requests together")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([*rows], [*map(str, rows)])
        axes.minorticks_off()
        axes.set_xlabel("requests", fontsize=SMALL)
        bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"model_experts": draw}
