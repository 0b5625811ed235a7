"""Draws chapter 20: block tables with a gather beside rows with mapped pages, and what the parts of a
decode step take.

    python -m tutorials.figures vattention_tables vattention_steps

The first is from a run of the engine, the second from tutorials/results/cpu_vattention.json. Needs
matplotlib.
"""

import json

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nanovllm import LLM, SamplingParams
from tutorials.figures.style import HERE, new_figure

RESULTS = HERE.parent / "results" / "cpu_vattention.json"
# of Okabe and Ito's colors, which the color-blind can tell apart
SEQUENCES = ["#0072B2", "#D55E00"]
PARTS = {
    "attention without gather": "#0072B2",
    "gather": "#E69F00",
    "mapping": "#D55E00",
    "the rest": "#BBBBBB",
}
MODEL = "qwen3-0.6b"
CASES = [(4, "4,000"), (16, "1,000"), (64, "250")]  # sequences, context
BLOCK_SIZE = 4
NUM_BLOCKS = 8
ROW_BLOCKS = 6

# --- both page tables ---


def two_sequences() -> tuple[list[list[int]], list[list[int]]]:
    """Block tables of two sequences with the same first block, and what their rows show."""
    llm = LLM(
        attention_backend="vattention",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=ROW_BLOCKS * BLOCK_SIZE,
        max_num_seqs=2,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for animal in ("fox", "king"):
        llm.add_request(f"Once upon a time there was a {animal}", params)
    for _ in range(6):
        llm.step()
    tables = [request.sequences[0].block_table for request in llm.requests.values()]
    return tables, llm.runner.kv_cache.page_table.shown


def box(axes, x: float, y: float, text: object = "", **style) -> None:
    axes.add_patch(Rectangle((x, y), 1, 0.7, **({"facecolor": "white"} | style)))
    axes.text(x + 0.5, y + 0.35, str(text), ha="center", va="center", fontsize=10)


def line(axes, begin: tuple[float, float], end: tuple[float, float], color: str, style="-"):
    x, y = zip(begin, end)
    axes.plot(x, y, color=color, linestyle=style, linewidth=1.2, zorder=0)


def draw_pool(axes, y: float, colors: dict[int, list[str]]) -> None:
    """The physical memory. A block that two sequences have is of both colors."""
    for block in range(NUM_BLOCKS):
        first, *others = colors.get(block, ["silver"])
        is_used = block in colors
        face = tint(first) if is_used else "white"
        box(axes, block, y, block, facecolor=face, edgecolor=first, linewidth=1.2)
        if others:
            style = {"facecolor": "none", "edgecolor": others[0], "linewidth": 0}
            box(axes, block, y, hatch="///", alpha=0.5, **style)


def tint(color: str) -> tuple[float, float, float]:
    """A light version, on which text can be read."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.75 + red / 4, 0.75 + green / 4, 0.75 + blue / 4


def draw_gather(axes, tables: list[list[int]], colors: dict[int, list[str]]) -> None:
    for i, (table, color) in enumerate(zip(tables, SEQUENCES)):
        left = 4.4 * i - 0.2
        axes.text(left, 5.25, f"block table of {'AB'[i]}", color=color, fontsize=10)
        axes.text(left, -0.35, f"copy of {'AB'[i]}'s keys", color=color, fontsize=10)
        for place, block in enumerate(table):
            x = left + place
            box(axes, x, 4.4, block, edgecolor=color, linewidth=1.2)
            line(axes, (x + 0.5, 4.4), (block + 0.5, 3.1), color)
            box(axes, x, 0, block, facecolor=tint(color), edgecolor=color, linestyle="--")
            line(axes, (block + 0.5, 2.4), (x + 0.5, 0.7), color, "--")
    draw_pool(axes, 2.4, colors)
    axes.text(NUM_BLOCKS + 0.15, 2.75, "blocks", va="center", fontsize=10)
    axes.text(NUM_BLOCKS + 0.15, 1.55, "gather: each\nstep and layer", va="center", fontsize=10)
    axes.text(NUM_BLOCKS + 0.15, 3.75, "read by us", va="center", fontsize=10)
    axes.text(4, -1.15, "attention reads the copies", ha="center", fontsize=11)
    axes.set_title("Paging in software", fontsize=12)


def draw_rows(axes, rows: list[list[int]], colors: dict[int, list[str]]) -> None:
    for i, (row, color) in enumerate(zip(rows, SEQUENCES)):
        y = 4.4 - 4.4 * i
        pool_edge, edge = (3.1, y) if i == 0 else (2.4, y + 0.7)
        axes.text(-0.2, y + 0.35, f"row of {'AB'[i]}", color=color, ha="right", va="center")
        for place in range(ROW_BLOCKS):
            if place < len(row):
                block = row[place]
                box(axes, place, y, block, facecolor=tint(color), edgecolor=color, linewidth=1.2)
                line(axes, (block + 0.5, pool_edge), (place + 0.5, edge), color)
            else:
                box(axes, place, y, hatch="...", edgecolor="silver", linestyle=":")
        axes.text(ROW_BLOCKS + 0.15, y + 0.35, "zeros", va="center", color="dimgray")
    draw_pool(axes, 2.4, colors)
    axes.text(-0.2, 2.75, "pages", ha="right", va="center", fontsize=10)
    note = "mapped by us,\nread by the\nprocessor"
    for y in (3.75, 1.55):
        axes.text(NUM_BLOCKS + 0.15, y, note, va="center", fontsize=10)
    axes.text(0, 5.25, "addresses of A", color=SEQUENCES[0], fontsize=10)
    axes.text(0, -0.35, "addresses of B", color=SEQUENCES[1], fontsize=10)
    axes.text(4, -1.15, "attention reads the rows; nothing is copied", ha="center", fontsize=11)
    axes.set_title("Paging by the page table of the processor", fontsize=12)


def draw_tables() -> Figure:
    tables, rows = two_sequences()
    colors: dict[int, list[str]] = {}
    for table, color in zip(tables, SEQUENCES):
        for block in table:
            colors.setdefault(block, []).append(color)
    figure = new_figure(13, 4.6)
    left, right = figure.subplots(1, 2)
    draw_gather(left, tables, colors)
    draw_rows(right, rows, colors)
    left.set_xlim(-0.5, NUM_BLOCKS + 2.4)
    right.set_xlim(-1.6, NUM_BLOCKS + 2)
    for axes in (left, right):
        axes.set_ylim(-1.4, 5.7)
        axes.set_axis_off()
    return figure


# --- the parts of a decode step ---


def parts_of(engine: dict) -> list[float]:
    """Milliseconds of each of PARTS. The measured `attention` includes the gather."""
    gather, mapping = engine["gather"], engine["mapping"]
    attention = engine["attention"] - gather
    rest = engine["total"] - engine["attention"] - mapping
    return [1e3 * seconds for seconds in (attention, gather, mapping, rest)]


def draw_steps() -> Figure:
    """The same number of keys in few sequences, and in many."""
    report = json.loads(RESULTS.read_bytes())
    rows = [
        row for row in report["vattention"][MODEL] if (row["sequences"], row["context"]) in CASES
    ]
    figure = new_figure(9, 3.6)
    for axes, row in zip(figure.subplots(1, len(rows), sharey=True), rows):
        engines = row["engines"]
        bottom = [0.0] * len(engines)
        columns = zip(*(parts_of(engine) for engine in engines.values()))
        for (part, color), heights in zip(PARTS.items(), columns):
            axes.bar(range(len(engines)), heights, 0.7, bottom, color=color, label=part)
            bottom = [below + height for below, height in zip(bottom, heights)]
        labels = [engine.replace(" ", "\nblocks of ") for engine in engines]
        axes.set_xticks(range(len(engines)), labels, fontsize=8)
        axes.set_title(f"{row['sequences']} sequences of {row['context']}", fontsize="medium")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.axes[0].set_ylabel("ms per decode step, Qwen3-0.6B's shape")
    handles = [Patch(color=color, label=part) for part, color in PARTS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


FIGURES = {"vattention_tables": draw_tables, "vattention_steps": draw_steps}
