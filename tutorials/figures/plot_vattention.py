"""Draws chapter 20: block tables with a gather above rows with mapped blocks, and what the parts of a
decode step take.

    python -m tutorials.figures vattention_tables vattention_steps

The first is from a run of the engine (Linux), the second from tutorials/results/cpu_vattention.json.
Needs matplotlib.
"""

import json
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import LLM, SamplingParams
from tutorials.figures.fills import EMPTY, GREEN, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import HERE, SMALL, bare, box, new_figure, title, write

RESULTS = HERE.parent / "results" / "cpu_vattention.json"

# --- both page tables ---

OWNERS = {"AB": GREEN, "A": SKY, "B": ORANGE, "": EMPTY}
DASHES = {"A": "-", "B": "--"}
ZEROS = Fill("white", ink="0.35", hatch="..")
BLOCK_SIZE = 8
NUM_BLOCKS = 8
ROW_BLOCKS = 5
NUM_STEPS = 16
HEIGHT = 0.6  # of a block
Table = list[int]


def two_sequences() -> tuple[dict[str, Table], list[Table]]:
    """The block tables of the two requests of the chapter, and what their rows show."""
    llm = LLM(
        dtype="float32",
        attention_backend="vattention",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=ROW_BLOCKS * BLOCK_SIZE,
        max_num_seqs=2,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for animal in ("fox", "king"):
        llm.add_request(f"Once upon a time there was a brave little {animal}", params)
    for _ in range(NUM_STEPS):
        llm.step()
    tables = [request.sequences[0].block_table for request in llm.requests.values()]
    return dict(zip("AB", tables)), llm.runner.kv_cache.page_table.shown


def draw_boxes(axes: Axes, x: float, y: float, blocks: list[int], owners: dict[int, str]) -> None:
    for i, block in enumerate(blocks):
        box(axes, x + i, y, 1, HEIGHT, OWNERS[owners.get(block, "")], block)


def owners_of(tables: dict[str, Table]) -> dict[int, str]:
    used = sorted({block for table in tables.values() for block in table})
    return {block: "".join(n for n, table in tables.items() if block in table) for block in used}


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], name: str) -> None:
    style = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 1, "linestyle": DASHES[name]}
    axes.annotate("", end, begin, arrowprops=style | {"linewidth": 0.8})


def draw_gather(axes: Axes, tables: dict[str, Table]) -> None:
    """Block tables, blocks, and the copies that attention reads."""
    owners = owners_of(tables)
    for name, table in tables.items():
        left = -0.15 if name == "A" else NUM_BLOCKS - len(table) + 0.15
        write(axes, left, 3.95, f"block table of {name}")
        write(axes, left, -0.2, f"copy of {name}'s keys")
        draw_boxes(axes, left, 3.1, table, {})
        draw_boxes(axes, left, 0.05, table, dict.fromkeys(table, name))
        for i, block in enumerate(table):
            x = left + i + 0.5
            arrow(axes, (x, 3.1), (block + 0.5, 2.15), name)
            arrow(axes, (block + 0.5, 1.55), (x, 0.65), name)
    draw_boxes(axes, 0, 1.55, [*range(NUM_BLOCKS)], owners)
    right = NUM_BLOCKS + 0.3
    write(axes, right, 2.65, "the engine reads\nits tables")
    write(axes, right, 1.85, "blocks")
    write(axes, right, 1.1, "gather: in each step,\nin each layer")
    write(axes, right, 0.35, "attention reads this")
    title(axes, "with a gather: each key is copied in each step")


def draw_rows(axes: Axes, tables: dict[str, Table], rows: list[Table]) -> None:
    """Rows of addresses above and below the blocks."""
    owners = owners_of(tables)
    for name, row in zip(tables, rows):
        y, pool, edge = (3.1, 2.15, 3.1) if name == "A" else (0.05, 1.55, 0.65)
        draw_boxes(axes, 0, y, row, owners)
        for i, block in enumerate(row):
            arrow(axes, (i + 0.5, edge), (block + 0.5, pool), name)
        for i in range(len(row), ROW_BLOCKS):
            box(axes, i, y, 1, HEIGHT, ZEROS, "zeros")
        what = f"addresses of {name}: attention reads this"
        write(axes, ROW_BLOCKS + 0.2, y + HEIGHT / 2, what)
    draw_boxes(axes, 0, 1.55, [*range(NUM_BLOCKS)], owners)
    right = NUM_BLOCKS + 0.3
    write(axes, right, 2.65, "the processor reads\nits page table")
    write(axes, right, 1.85, "the same blocks")
    write(axes, right, 1.1, "the processor reads\nits page table")
    title(axes, "with rows: the same blocks have a second address, in order")


def draw_tables() -> Figure:
    tables, rows = two_sequences()
    figure = new_figure(8.5, 6.6)
    above, below = figure.subplots(2, 1, height_ratios=[4.6, 4.0])
    draw_gather(above, tables)
    draw_rows(below, tables, rows)
    above.set_ylim(-0.45, 4.2)
    below.set_ylim(-0.1, 3.9)
    for axes in (above, below):
        axes.set_xlim(-0.2, NUM_BLOCKS + 3)
        bare(axes)
    return figure


# --- the parts of a decode step ---


class Case(NamedTuple):
    model: str
    name: str  # of the model, for readers
    sequences: int
    context: str
    engines: dict[str, str]  # as measured, and for readers


LARGE = {
    "torch 16": "gathered",
    "vattention 16": "rows",
    "vattention 256": "rows,\nblocks of 256",
}
SMALL_MODEL = {"torch 16": "gathered", "vattention 16": "rows"}
CASES = [
    Case("qwen3-0.6b", "Qwen3-0.6B's shape", 4, "4,000", LARGE),
    Case("qwen3-0.6b", "Qwen3-0.6B's shape", 16, "1,000", LARGE),
    Case("tiny-qwen3", "embedded model", 64, "1,000", SMALL_MODEL),
    Case("tiny-qwen3", "embedded model", 64, "100 to 1,900", SMALL_MODEL),
]
PARTS = {"attention": SKY, "gather": WASTE, "the rest": EMPTY}


def parts_of(engine: dict) -> dict[str, float]:
    """Milliseconds. The measured `attention` includes the gather; mapping is in the rest."""
    attention = engine["attention"] - engine["gather"]
    rest = engine["total"] - engine["attention"]
    seconds = dict(zip(PARTS, (attention, engine["gather"], rest)))
    return {part: 1000 * value for part, value in seconds.items()}


def draw_case(axes: Axes, case: Case, engines: dict[str, dict]) -> None:
    longest = 1000 * max(engine["total"] for engine in engines.values())
    for y, engine in enumerate(case.engines):
        left = 0.0
        for part, width in parts_of(engines[engine]).items():
            if not width:
                continue
            is_first = y == 0
            label = f"{part} {width:,.0f}" if is_first else f"{width:,.0f}"
            box(axes, left, -y - 0.35, width, 0.7, PARTS[part], label)
            left += width
        write(axes, left + longest / 80, -y, f"{left:,.0f} ms")
    names = [*case.engines.values()]
    axes.set_yticks([-y for y in range(len(names))], names)
    axes.set_xlim(0, 1.13 * longest)
    axes.set_ylim(0.5 - len(names), 0.5)
    bare(axes, ["left"])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0, labelsize=SMALL)
    title(axes, f"{case.name}: {case.sequences} sequences of {case.context} tokens")


def draw_steps() -> Figure:
    """Where rows win, and where they lose."""
    report = json.loads(RESULTS.read_bytes())["vattention"]
    figure = new_figure(8.5, 5.6)
    heights = [len(case.engines) + 0.5 for case in CASES]
    for axes, case in zip(figure.subplots(len(CASES), 1, height_ratios=heights), CASES):
        wanted = case.sequences, case.context
        rows = report[case.model]
        row = next(row for row in rows if (row["sequences"], row["context"]) == wanted)
        draw_case(axes, case, row["engines"])
    return figure


FIGURES = {"vattention_tables": draw_tables, "vattention_steps": draw_steps}
