"""Draws the launches of one layer, one by one and replayed.

    python -m tutorials.figures graphs_replay

tests/device/test_launches.py counts them. How long each takes is made up.
"""

from functools import partial

from matplotlib.figure import Figure

from tutorials.figures.fills import GREEN, ORANGE, SKY, WASTE
from tutorials.figures.style import SMALL, bare, box, new_figure, title, write

KERNELS = [
    "add,\nnorm",
    "qkv",
    "norm,\nrotate,\nstore",
    "atten-\ntion",
    "add up\nparts",
    "o",
    "add,\nnorm",
    "gate,\nup",
    "silu,\nmul",
    "down",
]
LAUNCH, RUN = 1.0, 0.42  # made up


def draw_replay() -> Figure:
    figure = new_figure(8.5, 4.2)
    above, below = figure.subplots(2, 1)
    num = len(KERNELS)
    for i, name in enumerate(KERNELS):
        box(above, i * LAUNCH, 1, LAUNCH, 0.8, SKY, name)
        end = (i + 1) * LAUNCH
        if i:
            box(above, end - LAUNCH + RUN, 0, LAUNCH - RUN, 0.6, WASTE)
        box(above, end, 0, RUN, 0.6, GREEN, i + 1)
        above.annotate("", (end, 0.6), (end, 1), arrowprops={"arrowstyle": "->", "shrinkB": 0})
    text = f"eager: Python launches the {num} kernels of a layer, and the device waits (hatched)"
    title(above, text)
    box(below, 0, 1, 0.8, 0.8, ORANGE, "copy")
    box(below, 0.8, 1, LAUNCH, 0.8, SKY, "replay")
    box(below, 0.8, 0, 0.3, 0.6, ORANGE)
    arrow = partial(below.annotate, "", arrowprops={"arrowstyle": "->", "shrinkB": 0})
    arrow((0.8, 0.6), (0.8, 1))
    begin = 0.8 + LAUNCH
    arrow((begin, 0.6), (begin, 1))
    for i in range(num):
        box(below, begin + i * RUN, 0, RUN, 0.6, GREEN, i + 1)
    title(below, "replayed: the inputs are copied to their places, then one launch starts all")
    note = "kernels: counted by a test; lengths: made up"
    write(below, num * LAUNCH + RUN, 1.4, note, ha="right", fontsize=SMALL)
    for axes in (above, below):
        write(axes, -0.1, 1.4, "Python", ha="right")
        write(axes, -0.1, 0.3, "device", ha="right")
        axes.set_xlim(-1.0, num * LAUNCH + RUN + 0.1)
        axes.set_ylim(-0.15, 1.95)
        bare(axes)
    return figure


FIGURES = {"graphs_replay": draw_replay}
