"""Draws the examples of chapter 13: the blocks of three samples, from a real BlockManager, and the
first beams of a search, from a real engine.

    python -m tutorials.figures blocks_samples blocks_beams

Needs matplotlib.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Request, Sequence
from tutorials.figures.blocks import BLOCK_SIZE, WIDTH, draw_slots
from tutorials.figures.fills import BLUE, EMPTY, GREEN, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, bare, box, new_figure, write

# --- three samples ---

NUM_SHOWN = 7  # blocks
FILLS = {"0": SKY, "1": ORANGE, "2": BLUE, "": WASTE}  # by owner; several: GREEN


class State(NamedTuple):
    """The blocks at one moment."""

    what: str
    owners: list[str]  # of each block, as "0 1 2"
    memory: list[list[int]]  # the tokens in each block
    copies: list[tuple[int, int]]


def states() -> list[State]:
    """The steps of the chapter."""
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    samples = Request("r", None, [0, 1, 2, 3, 4, 5], SamplingParams(n=3)).sequences
    first, *others = samples
    manager.allocate(first, 6)
    first.num_computed_tokens = 6
    for other in others:
        manager.fork(first, other)
    memory = [[0, 1, 2, 3], [4, 5], *([] for _ in range(6))]
    found = [state_of("the prompt,\nthen two forks", manager, samples, memory, [])]
    for position in (6, 7, 8):
        for i, seq in enumerate(samples):
            seq.token_ids.append(10 * position + i)
            manager.allocate(seq, 1)
        copies = manager.take_moves().copies
        for source, target in copies:
            memory[target] = list(memory[source])
        for seq in samples:
            memory[seq.block_table[position // BLOCK_SIZE]].append(seq.token_ids[position])
            seq.num_computed_tokens += 1
        if position == 6:
            found.append(state_of("token 6", manager, samples, memory, copies))
    found.append(state_of("tokens 7 and 8", manager, samples, memory, []))
    manager.free(first)
    found.append(state_of("sample 0 ends", manager, samples, memory, []))
    return found


def state_of(
    what: str, manager: BlockManager, samples: list[Sequence], memory: list[list[int]], copies
) -> State:
    owners = [
        " ".join(str(i) for i, seq in enumerate(samples) if block in seq.block_table)
        for block in range(NUM_SHOWN)
    ]
    counts = [block.ref_count for block in manager.blocks[:NUM_SHOWN]]
    assert [len(names.split()) for names in owners] == counts
    return State(what, owners, [[*tokens] for tokens in memory], copies)


def draw_samples() -> Figure:
    """A row for each state, a column for each block."""
    figure = new_figure(8.5, 4.6)
    axes = figure.subplots()
    for row, state in enumerate(states()):
        y = -1.35 * row
        write(axes, -0.15, y + 0.25, state.what, ha="right")
        for block, owners in enumerate(state.owners):
            draw_block(axes, block, y, owners, state.memory[block])
        for source, target in state.copies:
            draw_copy(axes, source, target, y)
        if state.copies:
            last = max(target for _, target in state.copies)
            note = "4 and 5 are copied twice, then all three write"
            write(axes, last + 0.6, y - 0.2, note, fontsize=SMALL)
    for block in range(NUM_SHOWN):
        write(axes, block + WIDTH / 2, 1.25, f"block {block}", ha="center")
    axes.set_xlim(-1.35, NUM_SHOWN)
    axes.set_ylim(-4.35, 1.45)
    bare(axes)
    return figure


def draw_block(axes: Axes, block: int, y: float, owners: str, tokens: list[int]) -> None:
    fill = FILLS.get(owners, GREEN)
    is_new = not owners and not tokens
    draw_slots(axes, block, y, 0.5, tokens, EMPTY if is_new else fill)
    note = "free" if not owners else f"sample {owners}"
    if " " in owners:
        note = "samples " + owners.replace(" ", ", ")
    write(axes, block + WIDTH / 2, y + 0.68, note, ha="center", fontsize=SMALL)


def draw_copy(axes: Axes, source: int, target: int, y: float) -> None:
    """An arrow below the blocks."""
    start, end = ((block + WIDTH / 2, y) for block in (source, target))
    depth = 0.18 / (target - source)
    style = {"arrowstyle": "->", "connectionstyle": f"bar,fraction={depth}", "shrinkA": 2}
    axes.annotate("", end, start, arrowprops=style)


# --- beams ---


@dataclass
class Beam:
    """A node of the tree."""

    words: str
    step: int  # after which it exists
    table: list[int]
    logprob: float
    parent: "Beam | None" = None
    copy: tuple[int, int] | None = None  # (from block, to block), before it writes
    freed: list[int] = field(default_factory=list)
    num_children: int = 0


class Tells(BlockManager):
    """Notes what a search does to its blocks."""

    beams: list[Beam]

    def find(self, seq: Sequence) -> Beam | None:
        return next((beam for beam in self.beams if beam.words == self.words(seq)), None)

    def words(self, seq: Sequence) -> str:
        return self.decode(seq.output_token_ids)

    def fork(self, parent, child, num_tokens=None):
        super().fork(parent, child, num_tokens)
        if child.output_token_ids:
            above = self.find(parent)
            beam = Beam(
                self.words(child), self.step, [*child.block_table], child.cumulative_logprob, above
            )
            if above:
                above.num_children += 1
            self.beams.append(beam)

    def allocate(self, seq, num_tokens):
        num_copies = len(self.moves.copies)
        super().allocate(seq, num_tokens)
        for copy in self.moves.copies[num_copies:]:
            self.find(seq).copy = copy

    def free(self, seq):
        table = seq.block_table
        super().free(seq)
        beam = self.find(seq)
        if beam:
            beam.freed = [i for i in table if self.blocks[i].ref_count == 0]


def beams(num_steps: int) -> list[Beam]:
    llm = LLM(
        block_size=BLOCK_SIZE, num_blocks=12, enable_prefix_caching=False, block_manager_cls=Tells
    )
    manager = llm.block_manager
    manager.beams = []
    manager.decode = llm.tokenizer.decode
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    llm.add_request("Once upon a time there was", search)
    for manager.step in range(1, num_steps + 1):
        llm.step()
    return manager.beams


def draw_beams() -> Figure:
    """A box for each beam with its words and blocks; below it what the next step does to it."""
    figure = new_figure(8.5, 4)
    axes = figure.subplots()
    tree = beams(3)
    places: dict[int, tuple[float, float]] = {}
    draw_node(axes, 0, 0, "Once upon a\ntime there was", [0, 1], GREEN)
    for beam in tree:
        row = sum(other.step == beam.step for other in tree[: tree.index(beam)])
        x, y = places[id(beam)] = 2.9 * beam.step, 1.75 * (1 - row)
        is_dropped = beam.step < 3 and beam.num_children == 0
        word = f"{beam.words.split()[-1]}  {beam.logprob:.2f}"
        draw_node(axes, x, y, word, beam.table, WASTE if is_dropped else SKY)
        from_x, from_y = places[id(beam.parent)] if beam.parent else (0, 0)
        axes.annotate("", (x, y), (from_x + 1.6, from_y), arrowprops={"arrowstyle": "->"})
        notes = ["step {}: copies {} to {}".format(beam.step + 1, *beam.copy)] if beam.copy else []
        if is_dropped:
            notes.append(f"no child: frees {beam.freed[0]}")
        for i, note in enumerate(notes):
            write(axes, x + 0.8, y - 0.6 - 0.25 * i, note, ha="center", fontsize=SMALL)
    for step in (1, 2, 3):
        copies = sum(beam.copy is not None for beam in tree if beam.step == step - 1)
        forks = sum(beam.step == step for beam in tree)
        freed = sum(len(beam.freed) for beam in tree if beam.step == step - 1)
        counts = {"copies": copies, "forks": forks, "blocks freed": freed}
        lines = [f"step {step}", *(f"{n} {what}" for what, n in counts.items() if n)]
        write(axes, 2.9 * step - 0.65, 3.2, "\n".join(lines), ha="center", va="top")
    axes.set_xlim(-0.1, 10.4)
    axes.set_ylim(-2.7, 3.3)
    bare(axes)
    return figure


def draw_node(axes: Axes, x: float, y: float, text: str, table: list[int], fill: Fill) -> None:
    blocks = "blocks " + ", ".join(map(str, table))
    box(axes, x, y - 0.45, 1.6, 0.9, fill, f"{text}\n{blocks}")


FIGURES = {"blocks_samples": draw_samples, "blocks_beams": draw_beams}
