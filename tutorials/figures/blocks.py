"""Blocks of the KV cache in a row, each with its slots side by side."""

from matplotlib.axes import Axes

from tutorials.figures.fills import Fill
from tutorials.figures.style import SMALL, box, write

BLOCK_SIZE = 4
WIDTH = 0.9  # of a block; from one to the next it is 1


def draw_slots(
    axes: Axes, block: int, y: float, height: float, tokens: list[int], fill: Fill
) -> None:
    """The slots of a block, with a token in each that is filled."""
    width = WIDTH / BLOCK_SIZE
    for slot in range(BLOCK_SIZE):
        x = block + slot * width
        box(axes, x, y, width, height, fill)
        if slot < len(tokens):
            middle = x + width / 2, y + height / 2
            write(axes, *middle, tokens[slot], fill, ha="center", fontsize=SMALL)
