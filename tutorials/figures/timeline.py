"""A picture of a run: a row for each seat or request, a column for each step, and in each cell which
request has computed how many tokens."""

from typing import NamedTuple

from matplotlib.axes import Axes

from tutorials.figures.fills import EMPTY, FILLS, WASTE, Fill
from tutorials.figures.style import TEXT, bare, box

HEIGHT = 0.8  # of a row; from one to the next it is 1


class Cell(NamedTuple):
    """What a request computes in a step: tokens that it needs, and others."""

    row: int
    step: int
    name: str
    fill: Fill
    needed: int
    wasted: int = 0


def fill_of(i: int) -> Fill:
    return FILLS[i % len(FILLS)]


def draw_timeline(axes: Axes, cells: list[Cell], rows: list[str], num_steps: int) -> None:
    """The first row is at the top. A row is white where no request computes."""
    length = 1 + max(cell.step for cell in cells)
    for row in range(len(rows)):
        box(axes, 0, -row, length, HEIGHT, EMPTY)
    for cell in cells:
        draw_cell(axes, cell)
    bare(axes, ["left", "bottom"])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([HEIGHT / 2 - row for row in range(len(rows))], rows, fontsize=TEXT)
    ticks = range(num_steps)
    axes.set_xticks([step + 0.5 for step in ticks], [str(step + 1) for step in ticks])
    axes.set_xlim(-0.02, num_steps + 0.02)
    axes.set_ylim(0.9 - len(rows), HEIGHT + 0.1)


def draw_cell(axes: Axes, cell: Cell) -> None:
    """Tokens that are not needed are hatched, in the upper half if there are others."""
    name, x, y = cell.name, cell.step, -cell.row
    if not cell.wasted:
        box(axes, x, y, 1, HEIGHT, cell.fill, f"{name} {cell.needed}".strip())
    elif not cell.needed:
        box(axes, x, y, 1, HEIGHT, WASTE, f"{name} {cell.wasted}".strip())
    else:
        box(axes, x, y, 1, HEIGHT / 2, cell.fill, f"{name} {cell.needed}".strip())
        box(axes, x, y + HEIGHT / 2, 1, HEIGHT / 2, WASTE, f"+{cell.wasted}")
