"""Draws chapter 21: the numbers that four bits can hold, and the least time of a step with fewer bits.

    python -m tutorials.figures small_numbers_row small_numbers_steps

Needs matplotlib.
"""

import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from nanovllm.topics.quantization.groups import Groups, dequantized, in_4_bits
from nanovllm.topics.simulator.cost_model import HARDWARE, SHAPES, shape_of, work_of
from tutorials.figures.style import SMALL, bare, new_figure, write

ROW = torch.tensor([[0.12, -0.31, 0.05, 0.22, -0.18, 0.09, 2.40, -0.27]])
BITS = {"16 bits": 16, "8 bits": 8 + 32 / 4096, "4 bits": 4 + 40 / 128}
MOST_TOKENS = 450


def draw_line(axes: Axes, y: float, name: str, weight: Groups, numbers: torch.Tensor) -> None:
    """The 16 numbers of a group as ticks, and above them its weights, each with a line to its
    tick."""
    assert weight.zeros is not None  # as always with 4 bits
    scale, zero = weight.scales.item(), weight.zeros.item()
    ticks = [(code - zero) * scale for code in range(16)]
    axes.hlines(y, ticks[0], ticks[-1], color="0.6", linewidth=1)
    axes.vlines(ticks, y - 0.13, y, color="black", linewidth=1)
    numbers_and_backs = zip(numbers.tolist(), dequantized(weight)[0].tolist())
    moves = [[(number, y + 0.3), (back, y)] for number, back in numbers_and_backs]
    axes.add_collection(LineCollection(moves, color="0.4", linewidth=1))
    axes.scatter(numbers, torch.full_like(numbers, y + 0.3), 16, color="black")
    write(axes, 0.55, y + 0.36, f"{name}, scale {scale:.3f}", ha="left")


def draw_row() -> Figure:
    """Once as one group, once as two."""
    figure = new_figure(7, 3)
    axes = figure.subplots()
    parts = {"one group of 8": ROW, "the first 4": ROW[:, :4], "the last 4": ROW[:, 4:]}
    for y, (name, part) in zip((2.2, 1.1, 0), parts.items()):
        draw_line(axes, y, name, in_4_bits(part, part.shape[1]), part[0])
    axes.set_xlim(-0.5, 2.6)
    axes.set_ylim(-0.3, 2.85)
    axes.set_xticks([0, 0.5, 1, 1.5, 2, 2.5])
    axes.set_xlabel("weights (points), and the 16 numbers of 4 bits (ticks)", fontsize=SMALL)
    bare(axes, ["bottom"])
    return figure


def draw_steps() -> Figure:
    """A flat line for each number of bits, as long as reading takes longer than computing."""
    shape, gpu = shape_of(SHAPES["qwen3-8b"], itemsize=2), HARDWARE["h100"]
    figure = new_figure(7, 3.2)
    axes = figure.subplots()
    counts = range(1, MOST_TOKENS + 1)
    works = [work_of(shape, [(n, n)], sampled=1) for n in counts]
    computing = [1000 * work.flops / gpu.flops_per_second for work in works]
    axes.plot(
        counts, computing, color="0.6", linewidth=3, label="computing, with any number of bits"
    )
    for (name, bits), style in zip(BITS.items(), ("-", "--", ":")):
        sizes = [work.weight_bytes * bits / 16 + work.kv_bytes for work in works]
        times = [1000 * size / gpu.bytes_per_second for size in sizes]
        end = sum(time > least for time, least in zip(times, computing))
        axes.plot(counts[:end], times[:end], style, color="black", linewidth=1.4, label=name)
        write(axes, 4, times[0] + 0.25, name, ha="left")
    write(axes, 262, 3.4, "computing, with any number of bits", ha="left")
    axes.set_xlim(0, MOST_TOKENS)
    axes.set_ylim(0, 7)
    axes.set_xlabel("tokens of a prompt in the step (Qwen3-8B on an H100)", fontsize=SMALL)
    axes.set_ylabel("ms, at least", fontsize=SMALL)
    bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"small_numbers_row": draw_row, "small_numbers_steps": draw_steps}
