"""Draws what bench.py measured: output tokens per second of every engine, the attention kernels, or
preemption.

    python -m tutorials.figures cpu_embedded                # the result in a chapter
    python -m tutorials.figures.plot_bench my_result.json   # another one

Writes NAME.png next to this script for a result NAME.json. Needs matplotlib.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from tutorials.figures.style import HERE, new_figure, save

RESULTS = HERE.parent / "results"
# of Okabe and Ito's colors, which the color-blind can tell apart
OURS = "#0072B2"
THEIRS = "#999999"


def plot_engines(axes, report: dict) -> None:
    """One bar per engine, with a line from its slowest round to its fastest; one that did not run
    says why."""
    names, engines = list(report["engines"]), report["engines"].values()
    speeds = [engine.get("output_tokens_per_second", 0) for engine in engines]
    ranges = [engine.get("output_tokens_per_second_range", (0, 0)) for engine in engines]
    errors = [
        [s - low for s, (low, _) in zip(speeds, ranges)],
        [high - s for s, (_, high) in zip(speeds, ranges)],
    ]
    colors = [OURS if name == "nanovllm" else THEIRS for name in names]
    axes.barh(names, speeds, xerr=errors, color=colors, error_kw={"capsize": 4})
    for i, (engine, speed, (_, high)) in enumerate(zip(engines, speeds, ranges)):
        axes.text(high, i, f"   {speed:,.0f}" if speed else f"   {engine['error']}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(
        f"output tokens per second: median, slowest and fastest of {report['rounds']} rounds"
    )
    work = f"{report['requests']} requests, {report['output_tokens']:,} output tokens"
    axes.set_title(f"{report['model']}, {report['dtype']}: {work}\n{report['device']}")


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
    report = json.loads(path.read_text())
    kind = next(kind for kind in KINDS if kind in report)
    rows = len(report[kind])
    height = {"engines": 1.5 + 0.5 * rows, "attention": 2 + 0.25 * rows, "preemption": 4}[kind]
    figure = new_figure(8, height)
    KINDS[kind](figure.subplots(), report)
    return figure


KINDS = {"engines": plot_engines, "attention": plot_attention, "preemption": plot_preemption}
FIGURES = {
    name: partial(draw, RESULTS / f"{name}.json")
    for name in (
        "cpu_embedded",
        "cpu_qwen3_0.6b",
        "cpu_preemption_embedded",
        "cpu_preemption_qwen3_0.6b",
    )
}


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
