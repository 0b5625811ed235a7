"""Draws what was found when pairs of policies ran on the real engine and were simulated.

    python -m tutorials.figures believe_signs believe_errors

believe_signs: the difference of each pair, simulated over measured. believe_errors: how far each
simulated time is from the measured one. Needs matplotlib.
"""

import json
from collections.abc import Iterable
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorials.figures.fills import WASTE
from tutorials.figures.style import HERE, SMALL, bare, box, new_figure, write
from tutorials.measure.pairs import KEYS, errors, judged

REPORT = HERE.parent / "results" / "simulator_pairs.json"
LOW, HIGH = 0.1, 150.0  # times the usual policy's
TICKS = {0.1: "0.1", 0.5: "half", 1.0: "equal", 2.0: "twice", 10.0: "10 times", 100.0: "100"}


def pairs_of_report() -> dict[str, dict]:
    return json.loads(REPORT.read_bytes())["pairs"]


def draw_signs() -> Figure:
    """A dot for each pair and measure: black if the difference is clear."""
    figure = new_figure(6, 5.4)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlim=(LOW, HIGH), ylim=(LOW, HIGH))
    box(axes, LOW, 1, 1 - LOW, HIGH - 1, WASTE)
    box(axes, 1, LOW, HIGH - 1, 1 - LOW, WASTE)
    axes.plot([LOW, HIGH], [LOW, HIGH], color="0.6", linewidth=1, label="exact")
    write(axes, 18, 26, "exact", ha="center")
    verdicts = [judged(row, key) for row in pairs_of_report().values() for key in KEYS]
    for is_clear, color in ((False, "white"), (True, "black")):
        chosen = [verdict for verdict in verdicts if verdict["is_clear"] == is_clear]
        x, y = ([1 + verdict[kind] for verdict in chosen] for kind in ("real", "simulated"))
        axes.scatter(x, y, s=22, c=color, edgecolors="black", linewidths=0.7, zorder=3)
    write(axes, 0.12, 90, "wrong sign", WASTE)
    write(axes, 22, 0.14, "wrong sign", WASTE)
    num_clear = sum(verdict["is_clear"] for verdict in verdicts)
    write(axes, 0.12, 56, f"black: {num_clear} clear differences", WASTE)
    write(axes, 0.12, 36, f"white: {len(verdicts) - num_clear} others", WASTE)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([*TICKS], [*TICKS.values()], fontsize=SMALL)
        axis.set_ticks([], minor=True)
    axes.set_xlabel("the other policy, measured")
    axes.set_ylabel("the other policy, simulated")
    return figure


def draw_errors() -> Figure:
    """A row of dots for each measure, and a bar at their mean."""
    figure = new_figure(7, 3.4)
    axes = figure.subplots()
    rows = pairs_of_report().values()
    for i, key in enumerate(KEYS):
        strip(axes, -i, (100 * error for row in rows for error in errors(row, key)))
    axes.vlines(0, 0.5 - len(KEYS), 0.5, color="0.6", linewidth=1)
    axes.set_yticks([-i for i in range(len(KEYS))], KEYS)
    bare(axes, ["left", "bottom"])
    axes.set_xlabel("simulated beside measured, %")
    return figure


def strip(axes: Axes, height: float, values: Iterable[float]) -> None:
    """Dots in three rows, so that neighbors can be told apart."""
    ordered = sorted(values)
    heights = [height + 0.16 * (i % 3 - 1) for i in range(len(ordered))]
    axes.scatter(ordered, heights, s=12, c="white", edgecolors="black", linewidths=0.7)
    axes.vlines(mean(ordered), height - 0.36, height + 0.36, color="black", linewidth=2.5)
    right = max(ordered)
    write(axes, right + 3, height, f"mean {mean(ordered):+.1f} %", fontsize=SMALL)


FIGURES = {"believe_signs": draw_signs, "believe_errors": draw_errors}
