"""Draws our steps under the roofline of the machine that ran them: what bench.py wrote for
nanovllm.

    python -m tutorials.figures cpu_roofline

Reads cpu_embedded and cpu_qwen3_0.6b_float32 in tutorials/results. A mark is all steps of one kind with 1,
2 to 3, 4 to 7, ... sequences. Needs matplotlib.
"""

import json
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.topics.simulator.cost_model import Hardware
from tutorials.figures.fills import BLUE, ORANGE
from tutorials.figures.style import HERE, SMALL, TEXT, new_figure, title, write

MODELS = {"cpu_embedded": "embedded model", "cpu_qwen3_0.6b_float32": "shapes of Qwen3-0.6B"}
MARKS = {"decode": ("o", BLUE), "prefill": ("s", ORANGE)}


class Mark(NamedTuple):
    """Steps of one kind."""

    least: int  # sequences
    most: int
    intensity: float  # FLOPs per byte
    rate: float  # GFLOP/s that were reached

    @property
    def name(self) -> str:
        if self.most == 1:
            return "1 sequence"
        return (
            f"{self.most} sequences" if self.least == self.most else f"{self.least} to {self.most}"
        )


def marks_of(steps: dict, kind: str) -> list[Mark]:
    groups: dict[int, list[dict]] = {}
    for row in steps[kind]:
        cells = dict(zip(steps["columns"], row))
        groups.setdefault(cells["sequences"].bit_length(), []).append(cells)
    marks = []
    for rows in groups.values():
        flops, num_bytes, seconds = (
            sum(row[name] for row in rows) for name in ("flops", "bytes", "seconds")
        )
        sizes = [row["sequences"] for row in rows]
        marks.append(Mark(min(sizes), max(sizes), flops / num_bytes, flops / seconds / 1e9))
    return marks


def roof(machine: Hardware, intensity: float) -> float:
    """GFLOP/s that cannot be passed."""
    return min(intensity * machine.bytes_per_second, machine.flops_per_second) / 1e9


def draw_panel(axes: Axes, name: str) -> None:
    report = json.loads((HERE.parent / "results" / f"{name}.json").read_bytes())
    ours = report["engines"]["nanovllm"]
    machine = Hardware(**ours["ceilings"])
    left, right = 0.3, 3000
    corners = [left, machine.ridge, right]
    axes.plot(corners, [roof(machine, x) for x in corners], color="black", label="the roof")
    at = machine.ridge / 3
    write(axes, at / 1.1, roof(machine, at) * 1.15, "the roof", ha="right")
    for kind, (marker, fill) in MARKS.items():
        marks = marks_of(ours["steps"], kind)
        points = [mark.intensity for mark in marks], [mark.rate for mark in marks]
        axes.scatter(*points, 40, marker=marker, color=fill.color, edgecolor="black", zorder=3)
        if kind == "prefill":
            last = max(marks, key=lambda mark: mark.intensity)
            write(axes, last.intensity, last.rate / 1.8, "steps with prompts", ha="center")
            continue
        for mark in (marks[0], marks[-1]):
            text = f"decodes of {mark.name}"
            write(axes, mark.intensity * 1.3, mark.rate / 1.35, text, va="top")
        draw_gap(axes, marks[-1], machine)
    note = (
        f"flat: {machine.flops_per_second / 1e9:,.0f} GFLOP/s, a large matrix product\n"
        f"rising: {machine.bytes_per_second / 1e9:,.0f} GB/s, a large copy"
    )
    write(axes, left * 1.3, 3000, note, fontsize=SMALL)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(1, 6000)
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.3)
    axes.set_xlabel("FLOPs per byte", fontsize=TEXT)
    title(axes, f"{MODELS[name]}, {report['dtype']}")


def draw_gap(axes: Axes, mark: Mark, machine: Hardware) -> None:
    """From the mark up to the roof."""
    top = roof(machine, mark.intensity)
    arrow = {"arrowstyle": "<->", "shrinkA": 4, "shrinkB": 0}
    axes.annotate("", (mark.intensity, top), (mark.intensity, mark.rate), arrowprops=arrow)
    write(axes, mark.intensity, top * 1.4, f"{top / mark.rate:.1f} x to gain at most")


def draw() -> Figure:
    figure = new_figure(9, 4.2)
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, name in zip(panels, MODELS):
        draw_panel(axes, name)
    panels[0].set_ylabel("GFLOP/s that were reached", fontsize=TEXT)
    return figure


FIGURES = {"cpu_roofline": draw}
