"""Draws the gain of a draft model over its acceptance, by the formula of chapter 22 and its measured
parts, with the gain of the engine itself at both ends.

    python -m tutorials.figures drafts_gain

Needs matplotlib.
"""

import json
from statistics import median

from matplotlib.figure import Figure

from tutorials.figures.style import HERE, SMALL, bare, new_figure

REPORT = HERE.parent / "results" / "cpu_drafts.json"
STYLES = {1: ":", 2: "--", 4: "-", 8: "-."}


def draw_gain() -> Figure:
    results = json.loads(REPORT.read_bytes())

    def middle(kind: str, k: int, runs: str = "noise") -> float:
        return median(run[kind] for run in results[runs] if run["k"] == k)

    def speed(runs: str, k: int) -> float:
        return median(run["tokens"] / run["seconds"] for run in results[runs] if run["k"] == k)

    def tokens(right: float, k: int) -> float:
        return sum(right**i for i in range(k + 1))

    figure = new_figure(6.5, 3.8)
    axes = figure.subplots()
    rights = [i / 100 for i in range(101)]
    decode = middle("target_1", 0)
    axes.axhline(1, color="0.6", linewidth=1)
    axes.text(0.02, 1.03, "no drafts", fontsize=SMALL, va="bottom")
    for k, style in STYLES.items():
        step = (middle(f"target_{k + 1}", k) + k * middle("draft_1", k)) / decode
        axes.plot(
            rights, [tokens(a, k) / step for a in rights], style, color="black", linewidth=1.2
        )
        above = 0.03 * (k == 4) - 0.05 * (k == 2)
        axes.text(1.02, tokens(1, k) / step + above, f"k = {k}", fontsize=SMALL, va="center")
        axes.plot([0], [speed("noise", k) / speed("noise", 0)], "ko", markersize=5)
    check = middle("target_5", 4) / decode
    gains = [tokens(a, 4) / (check + 4 * 0.1) for a in rights]
    axes.plot(rights, gains, color="0.45", linewidth=2.5)
    axes.text(0.7, 2.0, "k = 4, a draft model\nof 0.1 decodes", fontsize=SMALL, ha="right")
    itself = [run for run in results["itself"] if run["k"] == 4]
    right = 1 - (5 - median(run["tokens"] / run["steps"] for run in itself)) / 4
    gain = speed("itself", 4) / speed("itself", 0)
    axes.plot([right], [gain], "ks", markersize=6)
    axes.annotate(
        "its own draft, k = 4",
        (right, gain),
        (0.88, 0.3),
        fontsize=SMALL,
        ha="center",
        arrowprops={"arrowstyle": "->", "shrinkB": 4},
    )
    axes.annotate(
        "the engine, drafts are noise",
        (0.01, speed("noise", 8) / speed("noise", 0)),
        (0.1, 0.06),
        fontsize=SMALL,
        va="center",
        arrowprops={"arrowstyle": "->", "shrinkB": 3},
    )
    axes.set_xlim(-0.02, 1.12)
    axes.set_ylim(0, 2.6)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_xlabel("probability that a draft token is accepted")
    axes.set_ylabel("times as fast as without drafts")
    bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"drafts_gain": draw_gain}
