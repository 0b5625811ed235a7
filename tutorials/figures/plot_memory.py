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
from tutorials.figures.style import HERE, SMALL, TEXT, bare, box, new_figure, title, write

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
        if shares["reserved"] < 0.03:
            said = f"{100 * shares['reserved']:.1f} reserved, {100 * shares['external_fragmentation']:.1f} free"
            write(axes, 100, 0.4 - row, said, ha="right", fontsize=SMALL)
        draw_mark(axes, -row, 100 * PAPER_TOKEN_STATES[name])
    axes.set_xlim(0, 101)
    axes.set_ylim(-len(systems) + 0.5, 0.9)
    axes.set_xlabel("% of the KV cache", fontsize=TEXT)
    bare(axes)
    return figure


def draw_paper(axes: Axes, width: int, share: float, name: str, side: int) -> None:
    """The paper's number, left (-1) or right (1) of ours."""
    axes.scatter(width + 0.3 * side, share, 30, marker="<" if side > 0 else ">", color="black")
    ha = "left" if side > 0 else "right"
    said = f"paper, {name}: {share:.0f}"
    write(axes, width + 0.5 * side, share, said, ha=ha, fontsize=SMALL)


def draw_sharing() -> Figure:
    """A line for each data set; a triangle where the paper has it, at 2 and at 6 sequences."""
    results = json.loads(RESULT.read_bytes())["sharing"]
    figure = new_figure(9, 3.6)
    all_axes = figure.subplots(1, 2, sharey=True)
    for axes, decoding in zip(all_axes, ("samples", "beams")):
        for (name, result), style in zip(results.items(), ("o--", "o-")):
            widths = sorted(int(width) for width in result[decoding])
            saved = [100 * result[decoding][str(width)]["saved"] for width in widths]
            axes.plot(widths, saved, style, color=BLUE.color, label=name)
            above = 5 if style == "o-" else -5
            write(axes, widths[1], saved[1] + above, name, ha="center")
            first, last = PAPER_SAVED[name, decoding]
            draw_paper(axes, widths[0], 100 * first, name, -1)
            draw_paper(axes, widths[-1], 100 * last, name, 1)
        title(axes, f"{decoding} of a prompt")
        axes.set_xticks(widths)
        axes.set_xlabel("sequences per request", fontsize=TEXT)
        axes.set_xlim(-1.5, 9.5)
        axes.set_ylim(0, 90)
        bare(axes, ["left", "bottom"])
    all_axes[0].set_ylabel("% of blocks saved by sharing", fontsize=TEXT)
    return figure


FIGURES = {"memory_waste": draw_waste, "memory_sharing": draw_sharing}
