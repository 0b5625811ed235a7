"""Draws the four sequences of chapter 06: their slots in the cache, what a gather copies, and masks.

    python -m tutorials.figures attention_gather attention_mask

Needs matplotlib, no torch.
"""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorials.figures.fills import BLUE, EMPTY, GREEN, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, bare, box, new_figure, title, write

BLOCK_SIZE = 4
NUM_BLOCKS = 12
WORK = [(7, 7), (4, 13), (1, 10), (1, 3)]  # (new tokens, all tokens)
TABLES = [[9, 2], [5, 11, 0, 7], [3, 8, 1], [6]]
NAMES = ["prompt", "chunk", "decode of 10", "decode of 3"]
FILLS = [GREEN, BLUE, SKY, ORANGE]
CHUNK = 1
Point = tuple[float, float]


# --- a gather ---


def place_of(block: int) -> Point:
    """Six blocks above, six below. From a slot to the next it is 1."""
    return block % 6 * (BLOCK_SIZE + 0.6), 7.2 if block < 6 else 0.2


def draw_gather() -> Figure:
    figure = new_figure(8.5, 4.8)
    axes = figure.subplots()
    for block in range(NUM_BLOCKS):
        draw_block(axes, block)
    for place, block in enumerate(TABLES[CHUNK]):
        draw_row(axes, place, block)
    write(axes, 5.3, 4.1, "keys of the chunk,\nafter the gather", ha="right")
    write(axes, 21.5, 4.1, "numbers are\npositions in\nthe sequence", fontsize=SMALL)
    axes.set_xlim(-0.2, 27.2)
    axes.set_ylim(-1, 9)
    bare(axes)
    return figure


def draw_block(axes: Axes, block: int) -> None:
    x, y = place_of(block)
    owner = next((b for b, table in enumerate(TABLES) if block in table), None)
    name = f"block {block}"
    for offset in range(BLOCK_SIZE):
        fill, label = EMPTY, ""
        if owner is not None:
            position = TABLES[owner].index(block) * BLOCK_SIZE + offset
            if position < WORK[owner][1]:
                fill, label = FILLS[owner], str(position)
        box(axes, x + offset, y, 1, 0.8, fill, label)
    if owner is not None:
        name += f": {NAMES[owner]}"
    name_y = y + 1.2 if block < 6 else y - 0.4
    write(axes, x + BLOCK_SIZE / 2, name_y, name, ha="center", fontsize=SMALL)


def draw_row(axes: Axes, place: int, block: int) -> None:
    """The tokens that come from this block, and an arrow from it."""
    start = place * BLOCK_SIZE
    count = min(BLOCK_SIZE, WORK[CHUNK][1] - start)
    x = 5.8 + start + place * 0.5
    for i in range(count):
        box(axes, x + i, 3.7, 1, 0.8, FILLS[CHUNK], start + i)
    left, y = place_of(block)
    is_above = block < 6
    begin = (left + count / 2, y - 0.05 if is_above else y + 0.85)
    end = (x + count / 2, 4.55 if is_above else 3.65)
    style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "color": "black"}
    axes.annotate("", end, begin, arrowprops=style)


# --- masks ---

Sees = Callable[[int, int], bool]  # query and key


def draw_mask() -> Figure:
    figure = new_figure(8.5, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.05, 1])
    draw_triangle(left)
    draw_masks(right)
    return figure


def draw_triangle(axes: Axes) -> None:
    """All queries of a sequence of 13 tokens. Only the last four are of this step."""
    m, n = WORK[CHUNK]
    title(axes, f"({m}, {n}): the last {m} rows of the triangle")
    for row in range(n):
        for key in range(n):
            sees = BLUE if row >= n - m else SKY
            box(axes, key, -row, 1, 1, sees if key <= row else EMPTY)
        write(axes, -0.3, 0.5 - row, row, ha="right", fontsize=SMALL)
        write(axes, row + 0.5, 1.35, row, ha="center", fontsize=SMALL)
    write(axes, 6.5, 2.2, "position of the key", ha="center", fontsize=SMALL)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    write(axes, 6.2, -1.5, "rows of earlier steps", fontsize=SMALL, bbox=paper)
    write(axes, 3.5, -10.5, "rows of this step", BLUE, fontsize=SMALL)
    write(axes, -1.5, -5.5, "position of the query", rotation=90, ha="center", fontsize=SMALL)
    axes.set_xlim(-2.2, 13.2)
    axes.set_ylim(-12.6, 2.7)
    axes.set_aspect("equal")
    bare(axes)


def draw_masks(axes: Axes) -> None:
    """The masks of the other three, and a mistake."""
    rows: list[tuple[float, str, int, int, Sees, Fill]] = [
        (0, "(7, 7): a prompt, the whole triangle", 7, 7, lambda q, k: k <= q, GREEN),
        (-9, "(1, 10): a decode sees all", 1, 10, lambda q, k: True, SKY),
        (-12, "(1, 3)", 1, 3, lambda q, k: True, ORANGE),
    ]
    for top, name, m, n, sees, fill in rows:
        draw_grid(axes, 0, top, m, n, sees, fill)
        write(axes, 0, top + 1.6, name)
    m, n = WORK[CHUNK]
    draw_grid(axes, 0, -16.2, m, n, lambda q, k: k <= q, BLUE, hidden=WASTE)
    write(axes, 0, -14.4, "the mistake: a triangle in the left corner hides old keys (hatched)")
    axes.set_xlim(-0.3, 19)
    axes.set_ylim(-19.6, 2.3)
    axes.set_aspect("equal")
    bare(axes)


def draw_grid(
    axes: Axes, x: float, top: float, m: int, n: int, sees: Sees, fill: Fill, hidden: Fill = EMPTY
) -> None:
    """Rows from above; keys that a query should see and does not are `hidden`."""
    for query in range(m):
        for key in range(n):
            wanted = hidden if key <= n - m + query else EMPTY
            box(axes, x + key, top - query, 1, 1, fill if sees(query, key) else wanted)


FIGURES = {"attention_gather": draw_gather, "attention_mask": draw_mask}
