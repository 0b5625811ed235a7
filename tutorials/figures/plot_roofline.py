"""Draws our steps under the roofline of the machine that ran them: what bench.py wrote for
nanovllm.

    python -m tutorials.figures cpu_roofline

Reads cpu_embedded and cpu_qwen3_0.6b in tutorials/results. A point is all steps of one kind with
one number of sequences. Needs matplotlib.
"""

import json
import math

from matplotlib.figure import Figure

from nanovllm.simulator.cost_model import Hardware
from tutorials.figures.style import HERE, new_figure

RESULTS = [HERE.parent / "results" / f"cpu_{name}.json" for name in ("embedded", "qwen3_0.6b")]
KINDS = {"decode": ("o", "#0072B2"), "prefill": ("s", "#E69F00")}


def points(steps: dict, kind: str) -> list[dict]:
    """FLOPs per byte (x) and FLOP/s (y) of each bin, with the bin's own columns."""
    rows = [dict(zip(steps["columns"], row)) for row in steps[kind]]
    return [
        row | {"x": row["flops"] / row["bytes"], "y": row["flops"] / row["seconds"]} for row in rows
    ]


def plot_roof(axes, machine: Hardware, left: float, right: float) -> None:
    axes.plot(
        [left, machine.ridge, right],
        [left * machine.bytes_per_second, machine.flops_per_second, machine.flops_per_second],
        color="black",
    )
    middle = math.sqrt(left * machine.ridge)
    for text, place, offset in (
        (
            f"copy: {machine.bytes_per_second / 1e9:,.0f} GB/s",
            (middle, middle * machine.bytes_per_second),
            (-6, 6),
        ),
        (
            f"matrix product: {machine.flops_per_second / 1e9:,.0f} GFLOP/s",
            (right, machine.flops_per_second),
            (0, 4),
        ),
    ):
        axes.annotate(text, place, offset, textcoords="offset points", ha="right", fontsize="small")


def draw_panel(axes, report: dict) -> None:
    ours = report["engines"]["nanovllm"]
    machine = Hardware(**ours["ceilings"])
    drawn = {kind: points(ours["steps"], kind) for kind in KINDS}
    everything = [point for kind in KINDS for point in drawn[kind]]
    left = min(point["x"] for point in everything) / 3
    right = 4 * max(machine.ridge, *(point["x"] for point in everything))
    plot_roof(axes, machine, left, right)
    for kind, (marker, color) in KINDS.items():
        chosen = drawn[kind]
        size = [
            30 + 400 * point["seconds"] / sum(p["seconds"] for p in everything) for point in chosen
        ]
        x, y = [point["x"] for point in chosen], [point["y"] for point in chosen]
        axes.scatter(
            x, y, size, marker=marker, color=color, alpha=0.7, edgecolor="white", label=kind
        )
        for point in {min(x): chosen[x.index(min(x))], max(x): chosen[x.index(max(x))]}.values():
            note = f"{point['sequences']} sequences" if point["sequences"] > 1 else "1 sequence"
            place = dict(
                xytext=(10, -10), textcoords="offset points", fontsize="x-small", color=color
            )
            axes.annotate(note, (point["x"], point["y"]), **place)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte")
    axes.set_title(f"{report['model']}, {report['dtype']}\n{report['device']}", fontsize="medium")
    axes.set_ylim(min(point["y"] for point in everything) / 2, 2 * machine.flops_per_second)
    axes.grid(alpha=0.3)
    for handle in axes.legend(loc="lower right").legend_handles:
        handle.set_sizes([40])


def draw() -> Figure:
    figure = new_figure(10, 4.5)
    all_axes = figure.subplots(1, len(RESULTS))
    for axes, path in zip(all_axes, RESULTS):
        draw_panel(axes, json.loads(path.read_text()))
    all_axes[0].set_ylabel("FLOP/s that were reached")
    return figure


FIGURES = {"cpu_roofline": draw}
