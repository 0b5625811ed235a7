"""Draws the example of chapter 07, from a real ModelRunner: the arrays of a step, and which of its
rows go to lm_head.

    python -m tutorials.figures step_arrays step_head

Needs matplotlib.
"""

from functools import cache
from itertools import pairwise

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import LLM, SamplingParams
from nanovllm.model_runner import ModelRunner
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from nanovllm.step import StepInputs
from tutorials.figures.fills import BLUE, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, bare, box, new_figure, write

PLAN = {  # token ids, start, number of tokens, block table
    "A": (range(100, 110), 6, 4, [5, 0, 2]),
    "B": (range(200, 208), 7, 1, [7, 1]),
    "C": (range(300, 303), 0, 3, [3]),
}
BATCH = "BAC"  # decodes come first
FILLS = dict(zip("ABC", (SKY, ORANGE, BLUE)))


@cache
def prepared() -> tuple[ModelRunner, StepInputs]:
    """The step of the chapter."""
    schedule = Schedule()
    for token_ids, start, num_tokens, block_table in PLAN.values():
        params = SamplingParams(temperature=0)
        (seq,) = Request("r", None, list(token_ids), params).sequences
        seq.block_table = block_table
        schedule.add(Item(seq, start, num_tokens))
    runner = LLM(block_size=4, num_blocks=8, max_num_batched_tokens=8).runner
    return runner, runner.prepare(schedule)


def owners(ends: list[int]) -> list[Fill]:
    """The fill of each entry of an array that has the sequences' parts one after the other."""
    counts = [end - begin for begin, end in pairwise(ends)]
    return [FILLS[name] for name, count in zip(BATCH, counts) for _ in range(count)]


def draw_row(axes: Axes, y: float, name: str, values: list[int], fills: list[Fill]) -> None:
    write(axes, -0.2, y + 0.3, name, ha="right")
    for x, (value, fill) in enumerate(zip(values, fills)):
        box(axes, x, y, 1, 0.6, fill, value)


def draw_ends(axes: Axes, y: float, name: str, ends: list[int]) -> None:
    """Numbers below the borders of the row above."""
    write(axes, -0.35, y, name, ha="right")
    for end in ends:
        write(axes, end, y, end, ha="center")


def draw_arrays() -> Figure:
    _, inputs = prepared()
    arrays = {name: tensor.tolist() for name, tensor in inputs.tensors.items()}
    ends = arrays["cu_seqlens_q"]
    of_token = owners(ends)
    figure = new_figure(8.5, 5.4)
    axes = figure.subplots()
    write(axes, -0.2, 4.95, "row", ha="right", fontsize=SMALL)
    for row in range(len(of_token)):
        write(axes, row + 0.5, 4.95, row, ha="center", fontsize=SMALL)
    write(axes, -0.2, 4.4, "sequence", ha="right")
    contexts = zip(BATCH, ends, ends[1:], arrays["context_lens"])
    for name, begin, end, context in contexts:
        box(axes, begin, 4.1, end - begin, 0.6, FILLS[name], name)
        box(axes, begin, 0.7, end - begin, 0.6, FILLS[name], context)
    draw_row(axes, 3.3, "input_ids", arrays["input_ids"], of_token)
    draw_row(axes, 2.6, "positions", arrays["positions"], of_token)
    draw_row(axes, 1.9, "slot_mapping", arrays["slot_mapping"], of_token)
    draw_ends(axes, 1.65, "cu_seqlens_q", ends)
    write(axes, -0.2, 1.0, "context_lens", ha="right")
    draw_row(axes, -0.5, "block_tables", arrays["block_tables"], owners(arrays["cu_blocks"]))
    draw_ends(axes, -0.75, "cu_blocks", arrays["cu_blocks"])
    sampled = arrays["sampled_rows"]
    draw_row(axes, -1.9, "sampled_rows", sampled, [of_token[row] for row in sampled])
    for y, text in {
        3.6: "a value for each token",
        1.65: "where each sequence begins",
        1.0: "tokens in the cache\nafter this step",
        -0.2: "the tables of B, A and C,\none after the other",
        -0.75: "where each table begins",
        -1.6: "the last rows of A, B and C,\nin the order of the plan",
    }.items():
        write(axes, 8.35, y, text, fontsize=SMALL)
    axes.set_xlim(-2, 11.1)
    axes.set_ylim(-2, 5.1)
    bare(axes)
    return figure


def draw_head() -> Figure:
    runner, inputs = prepared()
    sampled = inputs.sampled_rows.tolist()
    fills = owners(inputs.batch.cu_seqlens_q.tolist())
    with torch.inference_mode():
        hidden, _ = runner.forward(inputs)
        logits = runner.model.lm_head(hidden[sampled])
    figure = new_figure(8.5, 3.9)
    axes = figure.subplots()
    places = {row: 5.7 - 2.1 * place for place, row in enumerate(sampled)}
    for row, token in enumerate(inputs.input_ids.tolist()):
        y = 7 - row
        write(axes, -0.15, y + 0.4, f"row {row}", ha="right", fontsize=SMALL)
        box(axes, 0, y, 1, 0.8, fills[row], token)
        arrow(axes, (1, y + 0.4), (2, y + 0.4))
        fill = fills[row] if row in sampled else WASTE
        box(axes, 4, y, 2.4, 0.8, fill, f"{hidden.shape[1]} numbers" if row in sampled else "")
        arrow(axes, (3.2, y + 0.4), (4, y + 0.4))
        if row in sampled:
            arrow(axes, (6.4, y + 0.4), (7.7, places[row]))
    box(
        axes,
        2,
        0,
        1.2,
        7.8,
        SKY._replace(color="white"),
        f"{len(runner.model.model.layers)}\nlayers",
    )
    box(axes, 7.7, 0.6, 1.1, 6, SKY._replace(color="white"), "lm_head")
    for name, row in zip(PLAN, sampled):
        y = places[row]
        arrow(axes, (8.8, y), (9.4, y))
        box(axes, 9.4, y - 0.4, 2.8, 0.8, fills[row], f"{name}: {logits.shape[1]:,} scores")
    note = "hatched: no next token is wanted;\ntheir keys and values are in the cache"
    write(axes, 9.1, 7.3, note, fontsize=SMALL, ha="center")
    axes.set_xlim(-0.9, 12.3)
    axes.set_ylim(-0.1, 7.9)
    bare(axes)
    return figure


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0})


FIGURES = {"step_arrays": draw_arrays, "step_head": draw_head}
