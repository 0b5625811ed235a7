"""Draws chapter 23: bytes of a request over its length, and a decode over its context.

python -m tutorials.figures hybrid_bytes hybrid_decode
"""

import json

from matplotlib.figure import Figure

from tutorials.figures.style import HERE, SMALL, bare, new_figure, write

REPORT = HERE.parent / "results" / "cpu_hybrid.json"
MIB = 2**20


def lines(axes, lengths, attention, hybrid, labels) -> None:
    axes.plot(lengths, attention, "o-", color="#E69F00", markersize=4)
    axes.plot(lengths, hybrid, "s--", color="#0B3C6F", markersize=4)
    for values, label in zip((attention, hybrid), labels):
        write(axes, lengths[-1], values[-1], f" {label}", ha="left", fontsize=SMALL)
    bare(axes, ["left", "bottom"])
    axes.set_xlim(0, lengths[-1] * 1.45)
    axes.set_ylim(0, attention[-1] * 1.08)


def draw_bytes() -> Figure:
    """Of the model with the sizes of the chapter's first block."""
    per_token = 4096 / MIB
    state = 24 * 4 * (3 * 8192 + 32 * 128 * 128) / MIB
    lengths = [0, 536, 2000, 4000, 6000, 8000]
    figure = new_figure(6, 3)
    axes = figure.subplots()
    attention = [length * 32 * per_token for length in lengths]
    hybrid = [state + length * 8 * per_token for length in lengths]
    labels = (
        "attention in 32 layers:\\n 1,000 MiB",
        f"in 8, and states in 24:\\n {hybrid[-1]:,.0f} MiB",
    )
    lines(axes, lengths, attention, hybrid, [label.replace("\\n", "\n") for label in labels])
    axes.set_xlabel("tokens of the request")
    axes.set_ylabel("MiB")
    axes.set_xticks(lengths[2:])
    return figure


def draw_decode() -> Figure:
    seconds = json.loads(REPORT.read_bytes())["seconds"]
    lengths = [int(length) for length in seconds["attention"]]
    figure = new_figure(6, 3)
    axes = figure.subplots()
    attention = [1000 * s for s in seconds["attention"].values()]
    hybrid = [1000 * s for s in seconds["hybrid"].values()]
    labels = (
        f"attention in 8 layers:\n {attention[-1]:.0f} ms",
        f"in 2, and states in 6:\n {hybrid[-1]:.0f} ms",
    )
    lines(axes, lengths, attention, hybrid, labels)
    axes.set_xlabel("tokens of the context")
    axes.set_ylabel("ms for a decode")
    axes.set_xticks([8000, 16_000, 32_000])
    return figure


FIGURES = {"hybrid_bytes": draw_bytes, "hybrid_decode": draw_decode}
