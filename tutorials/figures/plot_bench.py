"""Draws what bench.py measured: output tokens per second of every engine.

    python -m tutorials.figures performance_engines

Reads cpu_embedded and cpu_qwen3_0.6b_float32 in tutorials/results. Needs matplotlib.
"""

import json

from matplotlib.figure import Figure

from tutorials.figures.fills import BLUE, SKY
from tutorials.figures.style import HERE, bare, box, new_figure, title, write

RESULTS = HERE.parent / "results"
LABELS = {
    "nanovllm-torch": "nanovllm,\nin PyTorch alone",
    "vllm": "vLLM {}",
    "hf": "transformers {},\none padded batch",
    "hf-cb": "transformers {},\ncontinuous batching",
}
MODELS = {"tiny_qwen3": "embedded model", "qwen3-0.6b-random": "shapes of Qwen3-0.6B"}


def plot_engines(axes, report: dict) -> None:
    """One bar per engine, the fastest above, with a line from its slowest round to its fastest; one
    that did not run says why."""
    engines = report["engines"]
    speeds = {name: engines[name].get("output_tokens_per_second", 0) for name in engines}
    names = sorted(engines, key=lambda name: -speeds[name])
    right = 1.45 * max(high_of(engine) for engine in engines.values())
    for row, name in enumerate(names):
        engine, speed = engines[name], speeds[name]
        box(axes, 0, -row, speed, 0.6, BLUE if name == "nanovllm" else SKY)
        text = engine.get("error")
        if text is None:
            low, high = engine["output_tokens_per_second_range"]
            for thickness, color in ((4, "white"), (1.5, "black")):
                axes.hlines(0.3 - row, low, high, color=color, linewidth=thickness)
            text = f"{speed:,.0f}  ({low:,.0f} to {high:,.0f})"
        write(axes, high_of(engine) + right / 60, 0.3 - row, text)
    labels = [LABELS.get(name, name).format(engines[name].get("version", "")) for name in names]
    axes.set_yticks([0.3 - row for row in range(len(names))], labels)
    axes.set_xlim(0, right)
    axes.set_ylim(-len(names) + 0.8, 0.8)
    bare(axes, ["left"])
    title(axes, f"{MODELS.get(report['model'], report['model'])}, {report['dtype']}: tokens/s")


def high_of(engine: dict) -> float:
    return engine.get("output_tokens_per_second_range", (0, 0))[1]


def draw_engines() -> Figure:
    """Two models, one above the other."""
    reports = [
        json.loads((RESULTS / f"{name}.json").read_bytes())
        for name in ("cpu_embedded", "cpu_qwen3_0.6b_float32")
    ]
    figure = new_figure(8.5, 5.4)
    sizes = [len(report["engines"]) for report in reports]
    for axes, report in zip(figure.subplots(len(reports), 1, height_ratios=sizes), reports):
        plot_engines(axes, report)
    return figure


FIGURES = {"performance_engines": draw_engines}
