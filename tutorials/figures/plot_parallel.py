"""Draws the ranks of chapter 18: which part of each matrix a rank has, and what two ranks do over time.

    python -m tutorials.figures parallel_shards parallel_timeline

The second reads tutorials/results/parallel_timeline.json. Needs matplotlib.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.loader import load_config
from nanovllm.parallel.shards import Part, Shard
from tutorials.figures.fills import BLUE, EMPTY, FILLS, GREEN, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import HERE, SMALL, bare, box, new_figure, point_out, title

# --- which part of each matrix a rank has ---

UNEVEN = SimpleNamespace(  # the model of the chapter
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=50,
    vocab_size=101,
)
MATRICES = ("embed_tokens q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head").split()
SPACE = 5.6  # from one matrix to the next
SIDE = 3.2  # of a square matrix


class Piece(NamedTuple):
    """Neighbouring rows or columns of a matrix, and the ranks that have them."""

    part: Part
    ranks: list[int]


def pieces_of(name: str, shards: list[Shard]) -> list[Piece]:
    found: dict[int, Piece] = {}
    for rank, shard in enumerate(shards):
        part = (shard.rows | shard.columns)[name]
        found.setdefault(part.begin, Piece(part, [])).ranks.append(rank)
    return [found[begin] for begin in sorted(found)]


def fills_of(piece: Piece) -> Iterator[tuple[int, Fill, str]]:
    """How many rows or columns, their fill, and what is written there. Zeros are hatched."""
    part = piece.part
    yield part.end - part.begin, FILLS[piece.ranks[0]], " ".join(map(str, piece.ranks))
    if part.padding:
        yield part.padding, WASTE, ""


def draw_matrix(axes: Axes, x: float, name: str, shards: list[Shard], hidden: int) -> None:
    """Its sides are drawn as the square roots of the real ones: otherwise some could not be seen."""
    by_rows = name in shards[0].rows
    pieces = pieces_of(name, shards)
    length = pieces[0].part.length
    shape = (length, hidden) if by_rows else (hidden, length)
    height, width = (SIDE * (side / hidden) ** 0.5 for side in shape)
    share = 1 / sum(piece.part.size for piece in pieces)
    done = 0.0
    for piece in pieces:
        for size, fill, label in fills_of(piece):
            begin, extent = done, size * share
            done += extent
            if by_rows:
                box(axes, x - width / 2, -height * done, width, height * extent, fill, label)
            else:
                left = x - width / 2 + width * begin
                box(axes, left, -height, width * extent, height, fill, label)
    axes.text(x, 0.5, name, ha="center", va="bottom", fontsize=SMALL)
    axes.text(x, -height - 0.4, f"{shape[0]} x {shape[1]}", ha="center", va="top", fontsize=SMALL)


def draw_model(axes: Axes, config, num_ranks: int) -> None:
    shards = [Shard(config, rank, num_ranks) for rank in range(num_ranks)]
    for i, name in enumerate(MATRICES):
        draw_matrix(axes, SPACE * i, name, shards, config.hidden_size)
    right = SPACE * len(MATRICES)
    box(axes, right - 1.6, -1.2, 3.2, 1.2, EMPTY, "all")
    axes.text(right, 0.5, "norms", ha="center", va="bottom", fontsize=SMALL)
    axes.set_xlim(-2.9, right + 2)
    longest = max(config.vocab_size / config.hidden_size, 1)
    axes.set_ylim(-SIDE * longest**0.5 - 1.8, 2)
    axes.set_aspect("equal")
    axes.set_axis_off()


def draw_shards() -> Figure:
    figure = new_figure(9.5, 5.3)
    above, below = figure.subplots(2, 1, height_ratios=[12, 10])
    draw_model(above, load_config(Path(EMBEDDED_MODEL)), 2)
    title(above, "the embedded model on 2 ranks: 6 query heads, 2 KV heads")
    draw_model(below, UNEVEN, 4)
    title(below, "a smaller model on 4 ranks: 8 query heads, 2 KV heads")
    for name, at in (("gate_proj", 5), ("lm_head", 8)):
        height = SIDE * ((50 if name == "gate_proj" else 101) / 32) ** 0.5
        x = SPACE * at + SIDE / 2
        point_out(below, "zeros", (x, 0.1 - height), (x + 0.5, -height - 1.2), fontsize=SMALL)
    return figure


# --- what two ranks do over time ---

RESULT = HERE.parent / "results" / "parallel_timeline.json"
ROWS = (1.3, 0.0)  # of rank 0 and rank 1
KINDS = {
    "compute": BLUE,
    "wait": WASTE,
    "add_up": ORANGE,
    "gather": SKY,
    "sample": GREEN,
    "tell": SKY,
}
Labels = dict[tuple[int, int], str]  # by rank, and place among its spans


def draw_ranks(axes: Axes, ranks: list[list[dict]], labels: Labels, end: float) -> None:
    """A row for each rank. Times are in milliseconds."""
    for rank, spans in enumerate(ranks):
        for i, span in enumerate(spans):
            begin, width = 1000 * span["begin"], 1000 * (span["end"] - span["begin"])
            label = labels.get((rank, i), "")
            box(axes, begin, ROWS[rank], width, 1, KINDS[span["kind"]], label)
    axes.set_xlim(-0.005 * end, end)
    axes.set_ylim(ROWS[1] - 0.1, ROWS[0] + 1.1)
    axes.set_yticks([row + 0.5 for row in ROWS], ["rank 0", "rank 1"])
    bare(axes, ["left", "bottom"])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def middle_of(span: dict) -> float:
    return 500 * (span["begin"] + span["end"])


def longest(ranks: list[list[dict]]) -> float:
    """In milliseconds, and a little room."""
    return 1020 * max(spans[-1]["end"] for spans in ranks)


def draw_token(
    axes: Axes, ranks: list[list[dict]], end: float, words: dict[str, list[str]]
) -> None:
    """What takes less than 0.2 ms cannot be seen."""
    seen = [[span for span in spans if span["end"] - span["begin"] > 2e-4] for spans in ranks]
    labels = {}
    for rank, spans in enumerate(seen):
        for i, span in enumerate(spans):
            labels[rank, i] = words[span["kind"]][rank]
    draw_ranks(axes, seen, labels, end)


def draw_step(axes: Axes, ranks: list[list[dict]]) -> None:
    """Each kind is named where it is seen well."""
    draw_ranks(axes, ranks, {}, longest(ranks))
    first, second = ranks
    above, below = ROWS[0] + 1, ROWS[1]
    adds = [span for span in first if span["kind"] == "add_up"]
    computes = [span for span in first if span["kind"] == "compute"]
    waits = [span for span in second if span["kind"] == "wait"]
    notes = [
        ("computes", computes[1], above, -0.2),
        ("all-reduce", adds[1], above, 0.3),
        ("samples, plans the next step", first[-2], above, -0.9),
        ("waits", max(waits[:-1], key=lambda span: span["end"] - span["begin"]), below, 0.0),
        ("the next step is told", second[-1], below, -0.1),
        ("logits to rank 0", next(s for s in second if s["kind"] == "gather"), below, -0.9),
    ]
    for text, span, y, shift in notes:
        away = 0.75 if y == above else -0.75
        at = middle_of(span), y
        point_out(axes, text, at, (at[0] + shift, y + away), ha="center", fontsize=SMALL)
    axes.set_ylim(below - 1.1, above + 1.1)
    axes.set_xlabel("milliseconds")


def draw_timeline() -> Figure:
    report = json.loads(RESULT.read_bytes())
    figure = new_figure(8.5, 5.4)
    first, second, third = figure.subplots(3, 1, height_ratios=[2.4, 2.4, 4.8])
    end = longest(report["by_layers"])
    words = {"compute": ["up", "down"], "wait": ["waits", "waits"]}
    draw_token(first, report["by_layers"], end, words)
    title(first, "two matrices, one token, split by layers")
    words["compute"] = [f"{half} half of up, {half} half of down" for half in ("first", "second")]
    draw_token(second, report["inside"], end, words)
    at = longest(report["inside"]) / 1.02, 1.15
    point_out(second, "all-reduce", at, (at[0] + 0.4, 1.15), fontsize=SMALL)
    title(second, "the same, each matrix split")
    draw_step(third, report["step"])
    title(third, "one step of the embedded model: two processes, 11 all-reduces")
    return figure


FIGURES = {"parallel_shards": draw_shards, "parallel_timeline": draw_timeline}
