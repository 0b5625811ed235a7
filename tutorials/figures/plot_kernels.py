"""Draws the example of chapter 10: which program computes which scores, and how the parts of a long
context are joined.

    python -m tutorials.figures kernels_tiles kernels_split

Computed as the kernels do it, without Triton. Chapter 10 runs the kernels on the same sequences.
"""

import math
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tutorials.figures.fills import BLUE, EMPTY, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, TEXT, bare, box, new_figure, point_out, title, write
from tutorials.measure.batches import random_batch

TOKENS, KEYS = 8, 16  # of a tile
WORK = {"decodes": [(1, 40), (1, 9)], "chunks": [(20, 20), (5, 37)]}  # queries, keys
NAMES = ["decode, 40 keys", "decode, 9 keys", "prompt, 20 keys", "chunk, 37 keys"]
LOG2_E = math.log2(math.e)

# --- which program computes what ---


class Program(NamedTuple):
    """Some queries of one sequence."""

    first: int
    last: int
    num_keys: int  # that it reads


def programs_of(queries: int, keys: int) -> list[Program]:
    tokens = 1 if queries == 1 else TOKENS
    firsts = range(0, queries, tokens)
    lasts = [min(first + tokens, queries) - 1 for first in firsts]
    return [Program(f, last, keys - queries + last + 1) for f, last in zip(firsts, lasts)]


def draw_tiles() -> Figure:
    figure = new_figure(8.5, 6.4)
    axes = figure.subplots()
    names = iter(NAMES)
    y = 0.0
    for sequences in WORK.values():
        number = 0
        for queries, keys in sequences:
            write(axes, -0.4, y - 0.5, next(names), ha="right")
            for i, program in enumerate(programs_of(queries, keys)):
                draw_program(axes, y, program, keys - queries, (SKY, ORANGE)[i % 2])
                rows = program.last - program.first + 1
                text = f"program {number}: {program.num_keys} keys"
                write(axes, program.num_keys + 0.5, y - rows / 2, text, fontsize=SMALL)
                if number == 0 and queries > 1:
                    note = "(keys 8 to 19 are in the future of all its queries)"
                    write(axes, program.num_keys + 8.5, y - rows / 2, note, fontsize=SMALL)
                    top = y
                y -= rows
                number += 1
            y -= 1.6
        y -= 0.8
    at, hatched = (
        (8, top - 5.3),
        "hatched: in the future of this row's query;\ncomputed, and thrown away",
    )
    point_out(axes, hatched, at, (21, top - 8))
    axes.set_xlim(-0.1, 50)
    axes.set_ylim(y + 1.6, 0.3)
    axes.set_xticks([0, 16, 32, 40])
    bare(axes, ["bottom"])
    axes.set_xlabel("keys, in tiles of 16; each row is a query", fontsize=TEXT)
    return figure


def draw_program(axes: Axes, y: float, program: Program, num_before: int, fill: Fill) -> None:
    """A row for each query: what it sees is filled. Then the borders of the tiles."""
    for i, query in enumerate(range(program.first, program.last + 1)):
        num_seen = num_before + query + 1
        box(axes, 0, y - i - 1, num_seen, 1, fill)
        if num_seen < program.num_keys:
            box(axes, num_seen, y - i - 1, program.num_keys - num_seen, 1, WASTE)
    rows = program.last - program.first + 1
    for begin in range(0, program.num_keys, KEYS):
        width = min(KEYS, program.num_keys - begin)
        style = {"fill": False, "edgecolor": "black", "linewidth": 2}
        axes.add_patch(Rectangle((begin, y - rows), width, rows, **style))


# --- the parts of a long context ---


class Part(NamedTuple):
    first: int
    end: int
    maximum: float
    total: float


def parts_of(num_parts: int) -> list[Part]:
    """Of the first decode: what its programs keep, for head 0."""
    sequences = [pair for pairs in WORK.values() for pair in pairs]
    _, kv = random_batch(sequences, 1, 128, num_layers=1)
    queries = torch.randn(27, 2, 128, generator=torch.Generator().manual_seed(67))
    keys = kv[0][0, 0, :, 0]
    scores = keys @ queries[0, 0] * 128**-0.5 * LOG2_E
    size = math.ceil(max(math.ceil(len(keys) / num_parts), KEYS) / KEYS) * KEYS
    parts = []
    for first in range(0, num_parts * size, size):
        chosen = scores[first : first + size]
        maximum = chosen.max().item() if len(chosen) else -math.inf
        total = (chosen - maximum).exp2().sum().item()
        parts.append(Part(first, min(first + size, len(keys)), maximum, total))
    return parts


def draw_split() -> Figure:
    parts = parts_of(4)
    most = max(part.maximum for part in parts)
    weights = [2 ** (part.maximum - most) for part in parts]
    whole = sum(part.total * weight for part, weight in zip(parts, weights))
    figure = new_figure(8.5, 3.9)
    axes = figure.subplots()
    for i, (part, weight) in enumerate(zip(parts, weights)):
        power = f"x 2^({part.maximum:.2f} - {most:.2f})\n= {weight:.2f}"
        draw_part(axes, i, part, power if part.end > part.first else "x 2^(-inf)\n= 0")
    text = f"the second kernel adds up the totals and the results. Largest maximum {most:.2f}, total {whole:.2f}"
    box(axes, 0, 0.7, 3 * STEP + KEYS, 0.8, BLUE, text)
    axes.set_xlim(-0.5, 3 * STEP + KEYS + 0.5)
    axes.set_ylim(0.4, 7)
    bare(axes)
    title(axes, "one decode over 40 keys, in four parts")
    return figure


STEP = 19  # from one part to the next


def draw_part(axes: Axes, i: int, part: Part, power: str) -> None:
    """Its keys, what its program keeps, and with what this is multiplied."""
    x, middle = i * STEP, i * STEP + KEYS / 2
    num_keys = max(0, part.end - part.first)
    keys = f"keys {part.first} to {part.end - 1}" if num_keys else "no keys"
    write(axes, x, 6.55, f"program {i}: {keys}")
    for key in range(num_keys):
        box(axes, x + key, 5.3, 1, 0.7, SKY)
    fill = EMPTY if num_keys else WASTE
    kept = f"maximum {part.maximum:.2f}\ntotal {part.total:.2f}" + "\nresult" * (num_keys > 0)
    box(axes, x, 3.1, KEYS, 1.7, fill)
    write(axes, middle, 3.95, kept, fill, ha="center")
    axes.annotate("", (middle, 1.5), (middle, 3.1), arrowprops={"arrowstyle": "->"})
    write(axes, middle + 0.6, 2.35, power, fontsize=SMALL)


FIGURES = {"kernels_tiles": draw_tiles, "kernels_split": draw_split}
