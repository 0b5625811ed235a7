"""Draws what tutorials/baselines/replay.py counted, with the paper's numbers beside ours (its
figures 2 and 15).

    python -m tutorials.figures memory_waste memory_sharing

Reads tutorials/results/memory.json. Needs matplotlib.
"""

import json

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorials.baselines.replay import PAPER_SAVED, PAPER_TOKEN_STATES
from tutorials.figures.fills import BLUE, ORANGE, SKY, WASTE
from tutorials.figures.style import HERE, SMALL, TEXT, bare, box, new_figure, write

RESULT = HERE.parent / "results" / "memory.json"

PARTS = {
    "token_states": ("tokens", BLUE),
    "reserved": ("reserved for\ntokens to come", SKY),
    "internal_fragmentation": ("internal fragmentation:\ncan hold no token", ORANGE),
    "external_fragmentation": ("external:\nfree, too\nsmall to use", WASTE),
}


def draw_mark(axes: Axes, y: float, share: float) -> None:
    """Where the tokens end in the paper's figure."""
    axes.scatter(share, y - 0.33, 20, marker="^", color="black")
    ha, space = ("left", 1) if share < 80 else ("right", -1)
    write(axes, share + space, y - 0.38, f"the paper: {share:.1f}", ha=ha, fontsize=SMALL)


def draw_waste() -> Figure:
    """A bar for each system, all of the cache long; below it a mark where the paper has it."""
    systems = json.loads(RESULT.read_bytes())["waste"]["ShareGPT"]["systems"]
    figure = new_figure(8.5, 3.6)
    axes = figure.subplots()
    for row, (name, shares) in enumerate(systems.items()):
        write(axes, -1, -row, name, ha="right")
        left = 0.0
        for part, (label, fill) in PARTS.items():
            width = 100 * shares[part]
            box(axes, left, -row - 0.25, width, 0.5, fill, f"{width:.1f}" if width > 3 else "")
            if row == 0:
                write(axes, left + width / 2, 0.32, label, ha="center", va="bottom", fontsize=SMALL)
            left += width
        draw_mark(axes, -row, 100 * PAPER_TOKEN_STATES[name])
    axes.set_xlim(0, 101)
    axes.set_ylim(-len(systems) + 0.5, 0.9)
    axes.set_xlabel("% of the KV cache", fontsize=TEXT)
    bare(axes)
    return figure


def draw_sharing() -> Figure:
    results = json.loads(RESULT.read_bytes())["sharing"]
    figure = new_figure(9, 3.5)
    all_axes = figure.subplots(1, 2, sharey=True)
    for axes, decoding in zip(all_axes, ("samples", "beams")):
        for (name, result), color in zip(results.items(), ("tab:blue", "tab:purple")):
            widths = sorted(result[decoding], key=int)
            saved = [100 * result[decoding][width]["saved"] for width in widths]
            axes.plot(widths, saved, "o-", color=color, label=f"{name}, replayed")
            paper = [100 * share for share in PAPER_SAVED[name, decoding]]
            axes.plot(
                [widths[0], widths[-1]],
                paper,
                "_",
                color=color,
                markersize=20,
                label=f"{name}, paper",
            )
        axes.set_title(f"{decoding} of a prompt", fontsize="medium")
        axes.set_xlabel("sequences per request")
        axes.set_ylim(0, 90)
    all_axes[0].legend(fontsize="small", markerscale=0.7)
    all_axes[0].set_ylabel("% of blocks saved by sharing")
    return figure


FIGURES = {"memory_waste": draw_waste, "memory_sharing": draw_sharing}
