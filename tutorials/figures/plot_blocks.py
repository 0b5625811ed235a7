"""Draws block tables and the blocks that they point to, from the state of a running engine.

    python -m tutorials.figures blocks_swap

Needs matplotlib.
"""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanovllm import LLM, SamplingParams
from tutorials.figures.style import new_figure

COLORS = ["tab:blue", "tab:orange", "tab:green", "tab:purple"]
BLOCK_SIZE, NUM_BLOCKS = 4, 8


class Snapshot:
    """Block tables, the tokens in every block, and its owners, as they are now."""

    def __init__(self, llm: LLM, title: str):
        self.title, blocks = title, llm.block_manager.blocks
        self.owners = [block.ref_count for block in blocks]
        self.findable = [block.key is not None for block in blocks]
        self.tables, self.texts, self.host_texts = {}, {}, {}
        for seq in (seq for request in llm.scheduler.unfinished() for seq in request.unfinished):
            self.tables[f"{seq.request.request_id} {seq.index}"] = (
                list(seq.block_table),
                list(seq.host_table),
            )
            for table, num_tokens, texts in (
                (seq.block_table, seq.num_computed_tokens, self.texts),
                (seq.host_table, seq.num_host_tokens, self.host_texts),
            ):
                for i, block_id in enumerate(table):
                    tokens = seq.token_ids[i * BLOCK_SIZE : min(num_tokens, (i + 1) * BLOCK_SIZE)]
                    texts[block_id] = [
                        llm.tokenizer.decode([token]).strip() or "·" for token in tokens
                    ]

    @property
    def height(self) -> float:
        return 1.1 * len(self.tables) + (6 if self.host_texts else 3.2)

    def draw(self, axes, colors: dict[str, str]) -> None:
        axes.set_title(self.title, fontsize=10, loc="left")
        for row, (name, tables) in enumerate(self.tables.items()):
            y, color = 1.1 * (len(self.tables) - row), colors[name]
            axes.text(-0.2, y, name, ha="right", va="center", color=color, fontsize=9)
            for table, style in zip(tables, ("-", "--")):
                for i, block_id in enumerate(table):
                    x = 2.2 * i + 1
                    if style == "-":
                        axes.plot(
                            [x, 2.2 * block_id + 1], [y, 0], color=color, linewidth=1, zorder=0
                        )
                    box = Rectangle(
                        (x - 0.35, y - 0.35),
                        0.7,
                        0.7,
                        facecolor="white",
                        edgecolor=color,
                        linestyle=style,
                    )
                    axes.add_patch(box)
                    axes.text(x, y, block_id, ha="center", va="center", fontsize=9)
        notes = [
            f"{n} owners" if n > 1 else "can be found" * (n == 0 and f)
            for n, f in zip(self.owners, self.findable)
        ]
        self._draw_blocks(axes, 0, self.texts, "KV cache", notes)
        if self.host_texts:
            self._draw_blocks(axes, -2.8, self.host_texts, "host's memory", [""] * NUM_BLOCKS)
        axes.set_xlim(-2.8, 2.2 * NUM_BLOCKS)
        axes.set_ylim(0.6 + 1.1 * len(self.tables) - self.height, 0.6 + 1.1 * len(self.tables))
        axes.axis("off")

    def _draw_blocks(
        self, axes, top: float, texts: dict[int, list[str]], name: str, notes: list[str]
    ) -> None:
        axes.text(-0.2, top - 0.8, name, ha="right", va="center", fontsize=9)
        for block_id, note in enumerate(notes):
            face, edge = ("whitesmoke", "black") if block_id in texts else ("white", "silver")
            axes.add_patch(
                Rectangle((2.2 * block_id, top - 1.6), 2, 1.6, facecolor=face, edgecolor=edge)
            )
            axes.text(
                2.2 * block_id + 1,
                top - 1.9,
                f"{block_id}  {note}",
                ha="center",
                va="center",
                fontsize=7,
            )
            for i, text in enumerate(texts.get(block_id, [])):
                x = 2.2 * block_id + 0.25 + 0.5 * i
                axes.text(x, top - 0.8, text, ha="center", va="center", fontsize=7.5, rotation=90)


def draw(snapshots: list[Snapshot]) -> Figure:
    heights = [snapshot.height for snapshot in snapshots]
    names = dict.fromkeys(name for snapshot in snapshots for name in snapshot.tables)
    figure = new_figure(9, 0.36 * sum(heights) + 0.3 * len(heights))
    all_axes = figure.subplots(len(snapshots), 1, height_ratios=heights)
    for axes, snapshot in zip(all_axes, snapshots):
        snapshot.draw(axes, dict(zip(names, COLORS)))
    return figure


def swap() -> list[Snapshot]:
    options = dict(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, enable_prefix_caching=False)
    block_bytes = LLM(**options).runner.shape.block_bytes
    llm = LLM(preemption_mode="swap", swap_gib=NUM_BLOCKS * block_bytes / 2**30, **options)
    llm.add_request(
        "Once upon a time there was a",
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        "first",
    )
    llm.add_request(
        "tell me a story", SamplingParams(n=2, seed=1, max_tokens=9, ignore_eos=True), "second"
    )
    while not llm.scheduler.num_swapped_blocks:
        before = Snapshot(llm, "all blocks are in use")
        llm.step()
    shots = [
        before,
        Snapshot(
            llm,
            "first needs a block: second is swapped out, the shared block once; its tables (dashed) list blocks of the host",
        ),
    ]
    while llm.scheduler.waiting:
        llm.step()
    shots.append(Snapshot(llm, "first has ended, second is back, in other blocks"))
    return shots


FIGURES = {
    "blocks_swap": lambda: draw(swap()),
}
