"""Draws the server of chapter 17: what its two threads do during a few steps, and how long the first
token takes under load.

    python -m tutorials.figures serving_threads serving_load

Both read files in tutorials/results. Needs matplotlib.
"""

import json

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutorials.figures.fills import BLUE, GREEN, ORANGE, Fill
from tutorials.figures.style import HERE, SMALL, bare, box, new_figure, point_out, title, write

RESULTS = HERE.parent / "results"

# --- two threads ---

CLIENTS = ("slow", "fast", "gone")  # for the three streams
ENGINE, LOOP = 1.4, 0.0  # the rows
FILLS: dict[str, tuple[float, Fill]] = {
    "step": (ENGINE, BLUE),
    "report": (ENGINE, ORANGE),
    "hear": (LOOP, ORANGE),
    "write": (LOOP, GREEN),
}
Bar = tuple[str, float, float, str]  # what, begin and end in ms, label


def bars() -> list[Bar]:
    """What is drawn. To make an event and to write it is one bar."""
    spans = json.loads((RESULTS / "serving_threads.json").read_bytes())["spans"]
    found: list[Bar] = []
    begin = 0.0
    for span in spans:
        what, label = span["what"], ""
        if what != "write":
            begin = span["begin"]
        if what == "event":
            continue
        if what == "write":
            label = CLIENTS[span["stream"]]
        found.append((what, 1000 * begin, 1000 * span["end"], label))
    return found


def draw_bars(axes: Axes, found: list[Bar], low: float, high: float) -> None:
    """Those between two times, as far as they lie there."""
    for what, begin, end, label in found:
        begin, end = max(begin, low), min(end, high)
        if begin < end:
            row, fill = FILLS[what]
            box(axes, begin, row, end - begin, 1, fill)
            middle = (begin + end) / 2
            write(axes, middle, row + 0.5, label, fill, ha="center", fontsize=SMALL)
    axes.set_xlim(low, high)
    axes.set_yticks([ENGINE + 0.5, LOOP + 0.5], ["engine's thread", "event loop"])
    bare(axes, ["left"])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)


def draw_threads() -> Figure:
    found = bars()
    steps = [bar for bar in found if bar[0] == "step"]
    reports = [bar for bar in found if bar[0] == "report"]
    writes = [bar for bar in found if bar[0] == "write"]
    figure = new_figure(8.5, 4.4)
    above, below = figure.subplots(2, 1, height_ratios=[1.2, 1.6])
    whole = [(what, begin, end, "") for what, begin, end, _ in found]
    draw_bars(above, whole, 0, reports[-1][2])
    for i, (_, begin, end, _) in enumerate(steps, 11):
        text = f"step {i}, {end - begin:.1f} ms"
        above.text((begin + end) / 2, ENGINE + 0.5, text, color="white", ha="center", va="center")
    at = (reports[0][1] + writes[5][2]) / 2
    point_out(above, "enlarged below", (at, LOOP + 0.1), (at, -0.55), ha="center", fontsize=SMALL)
    above.set_ylim(-0.8, 2.5)
    title(above, "three steps with three streams")

    low, high = reports[0][1] - 0.02, writes[5][2] + 0.02
    draw_bars(below, found, low, high)
    report, hear = reports[0], next(bar for bar in found if bar[0] == "hear" and bar[1] > low)
    middle = (report[1] + report[2]) / 2
    below.text(middle, ENGINE + 0.5, "report", ha="center", va="center")
    below.text((report[2] + high) / 2, ENGINE + 0.5, "step 12", color="white", va="center")
    below.annotate("", (hear[1], LOOP + 1), (report[2], ENGINE), arrowprops={"arrowstyle": "->"})
    below.text(report[2] - 0.003, 1.15, "one call", ha="right", va="center", fontsize=SMALL)
    note = "takes the news in"
    point_out(below, note, (hear[1], LOOP + 0.5), (hear[1] - 0.01, 0.5), ha="right", fontsize=SMALL)
    between = (writes[3][1] + writes[5][2]) / 2
    below.text(between, 1.15, "writes to each client", ha="center", va="center", fontsize=SMALL)
    below.set_ylim(-0.1, 2.5)
    width = high - low
    title(
        below, f"{width:.2f} ms of it: between the model's steps 11 and 12, the news is handed over"
    )
    return figure


# --- load ---

STYLES = {"nanovllm": "o-", "vllm": "s--", "naive": "^:"}


def draw_load() -> Figure:
    report = json.loads((RESULTS / "cpu_serving_load.json").read_bytes())
    names = {
        "nanovllm": "nanovllm",
        "vllm": f"vLLM {report['servers']['vllm']}",
        "naive": "naive server",
    }
    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    for name, label in names.items():
        rows = report["load"][name]
        rates = [row["rate"] for row in rows]
        times = [1000 * row["ttft_p50"] for row in rows]
        axes.plot(rates, times, STYLES[name], color="black", linewidth=1, label=label)
    axes.text(6, 190, names["naive"], ha="right", va="bottom", fontsize=SMALL)
    axes.text(118, 1100, names["nanovllm"], ha="right", va="center", fontsize=SMALL)
    axes.text(155, 150, names["vllm"], ha="left", va="center", fontsize=SMALL)
    axes.text(17.5, 1400, "and falls behind", ha="left", va="center", fontsize=SMALL)
    full = next(row for row in report["load"]["nanovllm"] if row["refused"])
    note = f"{full['refused']:.0f} of {full['requests']:,.0f}\nare refused"
    at = (full["rate"], 1000 * full["ttft_p50"])
    point_out(axes, note, at, (110, 3500), ha="right", fontsize=SMALL)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [row["rate"] for row in report["load"]["nanovllm"] if row["rate"] != 96]
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    axes.set_yticks([10, 100, 1000], ["10 ms", "100 ms", "1 s"])
    axes.minorticks_off()
    axes.set_xlim(0.9, 330)
    axes.set_ylim(5, 6000)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("time to the first token, p50")
    bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"serving_threads": draw_threads, "serving_load": draw_load}
