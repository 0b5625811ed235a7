"""Draws chapter 00: four requests in the engine, step by step, and what weights and cache take.

    python -m tutorials.figures overview_seats overview_memory

Needs matplotlib.
"""

from matplotlib.figure import Figure

from nanovllm import LLM
from nanovllm.simulator.cost_model import SHAPES, shape_of
from tutorials.figures.plot_ladder import cells_of
from tutorials.figures.style import BLUE, ORANGE, TEXT, bare, box, new_figure, write
from tutorials.figures.timeline import HEIGHT, draw_timeline
from tutorials.ladder.__main__ import QUESTIONS, four_requests, run_engine

BUDGET = 32  # tokens per step
TOKENS = 1000  # of a request
REQUESTS = (1, 11, 16, 64)
MB = 10**6


def draw_seats() -> Figure:
    llm = LLM(dtype="float32", device="cpu", num_blocks=64, max_num_batched_tokens=BUDGET)
    requests = four_requests(llm)
    steps = run_engine(llm, requests).steps
    cells = [cell._replace(name="") for cell in cells_of(steps, requests, range(len(requests)))]
    names = [f"{'ABCD'[i]}: {text.splitlines()[-1]}" for i, text in enumerate(QUESTIONS)]
    figure = new_figure(8.5, 2.5)
    axes = figure.subplots()
    draw_timeline(axes, cells, names, len(steps))
    totals = [step.tokens for step in steps]
    labels = [f"step {i}\n{n} token{'s' * (n > 1)}" for i, n in enumerate(totals, 1)]
    axes.set_xticks(axes.get_xticks(), labels)
    for row in range(len(requests)):
        first = min(cell.step for cell in cells if cell.row == row)
        if first:
            write(axes, first / 2, HEIGHT / 2 - row, "waits", ha="center")
    write(axes, 5.15, HEIGHT / 2 - 2, "its prompt of 47 in two pieces")
    return figure


def draw_memory() -> Figure:
    """Weights and cache in one bar for each number of requests."""
    shape = shape_of(SHAPES["qwen3-0.6b"], itemsize=2)
    weights = shape.weight_bytes / MB
    figure = new_figure(8.5, 2.6)
    axes = figure.subplots()
    for row, count in enumerate(REQUESTS):
        cache = count * TOKENS * shape.kv_bytes / MB
        label = f"cache {cache:,.0f}"
        write(axes, -60, -row, f"{count} request{'s' * (count > 1)}", ha="right")
        box(axes, 0, -row - 0.3, weights, 0.6, BLUE, f"weights {weights:,.0f}")
        box(axes, weights, -row - 0.3, cache, 0.6, ORANGE, label if count > 1 else "")
        if count == 1:
            write(axes, weights + cache + 60, -row, label)
        if count - 1 < weights * MB / (TOKENS * shape.kv_bytes) <= count:
            write(axes, weights + cache + 60, -row, "more cache than weights")
    axes.set_xlim(0, 8600)
    axes.set_ylim(0.5 - len(REQUESTS), 0.4)
    bare(axes, ["bottom"])
    ticks = range(0, 8001, 2000)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("MB, for Qwen3-0.6B in bfloat16 and requests of 1,000 tokens", fontsize=TEXT)
    return figure


FIGURES = {"overview_seats": draw_seats, "overview_memory": draw_memory}
