"""Draws what bench.py measured: output tokens per second of every engine, the attention kernels, or
preemption.

    python -m tutorials.figures performance_engines         # the results in a chapter
    python -m tutorials.figures.plot_bench my_result.json   # another one

Writes NAME.png next to this script for a result NAME.json. Needs matplotlib.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from tutorials.figures.fills import BLUE, SKY
from tutorials.figures.style import HERE, bare, box, new_figure, save, title, write

RESULTS = HERE.parent / "results"
LABELS = {
    "nanovllm-torch": "nanovllm,\nin PyTorch alone",
    "vllm": "vLLM {}",
    "hf": "transformers {},\none padded batch",
    "hf-cb": "transformers {},\ncontinuous batching",
}
MODELS = {"tiny_qwen3": "embedded model", "qwen3-0.6b-random": "shapes of Qwen3-0.6B"}
# of Okabe and Ito's colors, which the color-blind can tell apart
OURS = "#0072B2"
THEIRS = "#999999"


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


def plot_attention(axes, report: dict) -> None:
    """How near to the measured ceiling each case comes, ours and PyTorch's."""
    rows = [row for row in report["attention"] if "skipped" not in row]
    labels = [
        "{batch} x {queries} over {context}, {heads}/{kv_heads} heads".format(**row) for row in rows
    ]
    for key, color, label in (
        ("floor_share", OURS, "nanovllm"),
        ("torch_floor_share", THEIRS, "PyTorch"),
    ):
        axes.plot([100 * row[key] for row in rows], range(len(rows)), "o", color=color, label=label)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlim(0)
    axes.set_xlabel("% of the measured ceiling")
    axes.set_title(f"attention, new tokens over context, {report['dtype']}\n{report['device']}")
    axes.legend()


def plot_preemption(axes, report: dict) -> None:
    """Time until the next token over the block size, by swap (out and in) and by recompute (the
    paper's figure 19)."""
    rows = report["preemption"]
    contexts = sorted({row["context"] for row in rows})
    for context, color in zip(contexts, ("#0072B2", "#E69F00", "#009E73", "#CC79A7")):
        chosen = [row for row in rows if row["context"] == context]
        sizes = [str(row["block_size"]) for row in chosen]
        swap = [1e3 * (row["swap_out_seconds"] + row["swap_in_seconds"]) for row in chosen]
        axes.plot(sizes, swap, "o-", color=color, label=f"swap, {context:,} tokens")
        recompute = [1e3 * row["recompute_seconds"] for row in chosen]
        axes.plot(sizes, recompute, "x--", color=color, label=f"recompute, {context:,} tokens")
    axes.set_yscale("log")
    axes.set_xlabel("tokens per block")
    axes.set_ylabel("ms until the next token")
    axes.set_title(f"{report['model']}, {report['dtype']}\n{report['device']}")
    axes.legend(fontsize="small")


def draw(path: Path) -> Figure:
    report = json.loads(path.read_bytes())
    kind = next(kind for kind in KINDS if kind in report)
    rows = len(report[kind])
    height = {"engines": 1.5 + 0.5 * rows, "attention": 2 + 0.25 * rows, "preemption": 4}[kind]
    figure = new_figure(8, height)
    KINDS[kind](figure.subplots(), report)
    return figure


KINDS = {"engines": plot_engines, "attention": plot_attention, "preemption": plot_preemption}


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        save(draw(path), HERE / f"{path.stem}.png")
        print(HERE / f"{path.stem}.png")


if __name__ == "__main__":
    main()
