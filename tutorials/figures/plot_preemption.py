"""Draws the example of chapter 04, from real runs of the scheduler: the blocks of three requests over
the steps, and blocks that wait in the host's memory.

    python -m tutorials.figures preemption_blocks blocks_swap

Needs matplotlib, no torch.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.scheduler import Scheduler
from tutorials.figures.blocks import BLOCK_SIZE, WIDTH
from tutorials.figures.fills import BLUE, EMPTY, ORANGE, SKY
from tutorials.figures.style import SMALL, bare, box, new_figure, point_out, title, write
from tutorials.play import play

JOBS = [("A", 0, 6, 12), ("B", 0, 7, 10), ("C", 1, 4, 8)]
NUM_BLOCKS = 8
FILLS = {"A": SKY, "B": ORANGE, "C": BLUE, "": EMPTY}


class State(NamedTuple):
    """The tables of each request while a step runs: its blocks, and its blocks on the host."""

    blocks: dict[str, list[int]]
    host: dict[str, list[int]]


def states(num_host_blocks: int) -> list[State]:
    """Of each step of the three requests."""
    found: list[State] = []

    class Watched(Scheduler):
        def schedule(self):
            schedule = super().schedule()
            seqs = {r.request_id: r.sequences[0] for r in self.unfinished()}
            blocks = {name: [*seq.block_table] for name, seq in seqs.items()}
            host = {name: [*seq.host_table] for name, seq in seqs.items()}
            found.append(State(blocks, host))
            return schedule

    play(JOBS, Watched, num_blocks=NUM_BLOCKS, num_host_blocks=num_host_blocks)
    return found


def owner(tables: dict[str, list[int]], block: int) -> str:
    return "".join(name for name, table in tables.items() if block in table)


def draw_blocks() -> Figure:
    steps = states(num_host_blocks=0)
    figure = new_figure(8.5, 3.6)
    axes = figure.subplots()
    for i, state in enumerate(steps):
        for block in range(NUM_BLOCKS):
            name = owner(state.blocks, block)
            box(axes, i + 0.5, NUM_BLOCKS - block - 0.5, 1, 1, FILLS[name], name)
    stopped = next(i for i, state in enumerate(steps) if state.blocks.get("C") == [] and i > 1)
    back = next(i for i, state in enumerate(steps) if i > stopped and state.blocks.get("C"))
    lost = steps[stopped - 1].blocks["C"]
    top = NUM_BLOCKS + 1.5
    note = f"X: B needs a block and none is free;\nC gives up blocks {lost[0]} and {lost[1]}"
    at = (stopped + 0.5, NUM_BLOCKS + 0.55)
    point_out(axes, note, at, (stopped + 0.3, top), ha="right")
    note = "C is back, and computes\nits 9 tokens again"
    point_out(axes, note, (back + 1, NUM_BLOCKS + 0.55), (back + 1, top), ha="center")
    axes.set_xlim(0.4, len(steps) + 0.6)
    axes.set_ylim(0.3, NUM_BLOCKS + 2.2)
    axes.set_ylabel("block")
    axes.set_xlabel("step")
    bare(axes, ("left", "bottom"))
    axes.set_xticks(range(1, len(steps) + 1))
    axes.set_yticks(range(1, NUM_BLOCKS + 1), range(NUM_BLOCKS - 1, -1, -1))
    return figure


def draw_pool(axes: Axes, y: float, tables: dict[str, list[int]], label: str) -> None:
    """A row of blocks, with the owner of each and the tokens that it holds."""
    write(axes, -0.15, y + 0.2, label, ha="right")
    for block in range(NUM_BLOCKS):
        name = owner(tables, block)
        first = tables[name].index(block) * BLOCK_SIZE if name else 0
        held = f"{name} {first}..{first + BLOCK_SIZE - 1}" if name else ""
        box(axes, block, y, WIDTH, 0.4, FILLS[name], held)
        write(axes, block + WIDTH / 2, y - 0.15, block, ha="center", fontsize=SMALL)


def draw_swap() -> Figure:
    steps = states(num_host_blocks=NUM_BLOCKS)
    out = next(i for i, state in enumerate(steps) if state.host.get("C"))
    back = next(i for i, state in enumerate(steps) if i > out and state.blocks.get("C"))
    titles = {
        out - 1: f"step {out}: all blocks are in use",
        out: f"step {out + 1}: C's blocks are copied to the host, B takes one of them",
        back: f"step {back + 1}: B has ended, C's blocks are copied back, into other blocks",
    }
    figure = new_figure(8.5, 5.2)
    for axes, (i, text) in zip(figure.subplots(3, 1), titles.items()):
        title(axes, text)
        draw_pool(axes, 1, steps[i].blocks, "KV cache")
        draw_pool(axes, 0.2, steps[i].host, "host's memory")
        axes.set_xlim(-1.5, NUM_BLOCKS)
        axes.set_ylim(-0.1, 1.5)
        bare(axes)
    return figure


FIGURES = {"preemption_blocks": draw_blocks, "blocks_swap": draw_swap}
