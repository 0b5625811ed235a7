"""Draws the example of chapter 02: two block tables, the blocks that they name, and the free list,
from a real BlockManager.

    python -m tutorials.figures blocks_tables

Needs matplotlib, no torch.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Request, Sequence
from tutorials.figures.blocks import BLOCK_SIZE, WIDTH, draw_slots
from tutorials.figures.fills import EMPTY, GREEN, ORANGE, SKY
from tutorials.figures.style import bare, box, new_figure, title, write

NUM_BLOCKS = 8
FILLS = {"ab": GREEN, "a": SKY, "b": ORANGE, "": EMPTY._replace(ink="0.55")}  # by owners


class State(NamedTuple):
    """What the block manager knows at one moment."""

    tables: dict[str, list[int]]
    owners: list[str]  # of each block, as "ab"
    free: list[int]
    cached: list[bool]


def sequence(tokens) -> Sequence:
    return Request("r", None, list(tokens), SamplingParams()).sequences[0]


def step(manager: BlockManager, seq: Sequence) -> None:
    """What the scheduler and the model do when the missing tokens of a sequence are computed."""
    num_tokens = seq.num_missing_tokens
    manager.allocate(seq, num_tokens)
    manager.cache_full_blocks(seq, len(seq))
    seq.num_computed_tokens += num_tokens
    manager.unwritten.clear()


def state_of(manager: BlockManager, **seqs: Sequence) -> State:
    tables = {name: list(seq.block_table) for name, seq in seqs.items()}
    owners = ["".join(n for n in tables if i in tables[n]) for i in range(NUM_BLOCKS)]
    assert [len(names) for names in owners] == [block.ref_count for block in manager.blocks]
    cached = [block.key is not None for block in manager.blocks]
    return State(tables, owners, list(manager.free_blocks), cached)


def run() -> tuple[State, State, list[list[int]]]:
    """Both sequences run, then a has ended; and the tokens in the slots of each block."""
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    a = sequence(range(10))
    step(manager, a)
    for token in (10, 11, 12):
        a.token_ids.append(token)
        step(manager, a)
    b = sequence([0, 1, 2, 3, 4, 5, 6, 7, 50, 51])
    manager.take_prefix(b)
    step(manager, b)
    slots: list[list[int]] = [[] for _ in range(NUM_BLOCKS)]
    for seq in (a, b):
        for i, block in enumerate(seq.block_table):
            slots[block] = seq.token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
    both = state_of(manager, a=a, b=b)
    manager.free(a)
    return both, state_of(manager, a=a, b=b), slots


def draw_state(axes: Axes, state: State, slots: list[list[int]]) -> None:
    """Each entry of a block table stands above its block."""
    rows = {"block table of a": 3.6, "block table of b": 3.05, "tokens in its slots": 2.25}
    rows |= {"block": 1.8, "ref_count (tables with it)": 1.45, "free list, next first": 0.7}
    for label, y in rows.items():
        write(axes, -0.15, y, label, ha="right")
    names = [f"{i}*" if cached else str(i) for i, cached in enumerate(state.cached)]
    for y, name, fill in ((3.4, "a", SKY), (2.85, "b", ORANGE)):
        for block in state.tables[name]:
            box(axes, block, y, WIDTH, 0.4, fill, block)
        if not state.tables[name]:
            write(axes, 0, y + 0.2, "empty")
    for block, owners in enumerate(state.owners):
        draw_slots(axes, block, 2.05, 0.4, slots[block], FILLS[owners])
        write(axes, block + WIDTH / 2, 1.8, names[block], ha="center")
        write(axes, block + WIDTH / 2, 1.45, len(owners), ha="center")
    for place, block in enumerate(state.free):
        box(axes, place, 0.5, WIDTH, 0.4, EMPTY, names[block])
    axes.set_xlim(-2.2, NUM_BLOCKS)
    bare(axes)


def draw() -> Figure:
    both, ended, slots = run()
    figure = new_figure(8.5, 5.8)
    above, below = figure.subplots(2, 1, height_ratios=[3.9, 4.1])
    draw_state(above, both, slots)
    title(above, "a and b run")
    note = "blocks 0 and 1 are in both tables:\ntheir tokens were computed once"
    write(above, 5, 3.35, note)
    write(above, 5, 0.7, "* can be found by its tokens")
    above.set_ylim(0.1, 4)
    draw_state(below, ended, slots)
    title(below, "a has ended")
    front = "3 goes to the front: it is not full,\nso nobody can find it"
    write(below, ended.free.index(3), 0.4, front, va="top")
    back = "2 goes to the back: who begins with\ntokens 0 to 11 can find it"
    write(below, ended.free.index(2), 0.4, back, va="top")
    below.set_ylim(-0.1, 4)
    return figure


FIGURES = {"blocks_tables": draw}
