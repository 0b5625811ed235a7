"""Draws the ranks of chapter 18: which part of a layer each has, and what two of them do in a step.

    python -m tutorials.figures parallel_shards parallel_timeline

The second is from a run here and now with two processes. Needs matplotlib.
"""

import multiprocessing
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL, TOKENS_PER_STEP, Config
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import load_config
from nanovllm.parallel.ranks import Group
from nanovllm.parallel.runner import Follower, Leader, end_steps
from nanovllm.parallel.shards import Part, Shard
from tutorials.figures.style import new_figure

# of Okabe and Ito's colors, which the color-blind can tell apart
RANKS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]
ALL = "#BBBBBB"

# --- which part of a layer each rank has ---

UNEVEN = SimpleNamespace(
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=50,
    vocab_size=101,
)
MATRICES = ("embed_tokens q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head").split()
SPACE = 6.2  # from one matrix to the next


def draw_matrix(axes, x: float, name: str, shards: list[Shard], hidden: int) -> None:
    """Its sides are drawn as the square roots of the real ones: otherwise some could not be seen."""
    by_rows = name in shards[0].rows
    table = shards[0].rows if by_rows else shards[0].columns
    length = table[name].length
    shape = (length, hidden) if by_rows else (hidden, length)
    height, width = (3.2 * (side / hidden) ** 0.5 for side in shape)
    owners: dict[int, list[int]] = {}
    parts: dict[int, Part] = {}
    for rank, shard in enumerate(shards):
        part = (shard.rows if by_rows else shard.columns)[name]
        owners.setdefault(part.begin, []).append(rank)
        parts[part.begin] = part
    padded = sum(part.size for part in parts.values())
    begin = 0
    for key in sorted(parts):
        part = parts[key]
        for size, is_padding in ((part.size - part.padding, False), (part.padding, True)):
            if size == 0:
                continue
            low, extent = begin / padded, size / padded
            begin += size
            if by_rows:
                box = (x - width / 2, -height * (low + extent), width, height * extent)
            else:
                box = (x - width / 2 + width * low, -height, width * extent, height)
            if is_padding:
                draw_box(axes, box, facecolor="white", edgecolor="black", linewidth=0.6)
                continue
            first, *others = owners[key]
            draw_box(axes, box, facecolor=RANKS[first], edgecolor="white", linewidth=1)
            if others:
                color = RANKS[others[0]]
                style = {"facecolor": "none", "hatch": "////", "linewidth": 0}
                draw_box(axes, box, edgecolor=color, **style)
    axes.text(x, 0.25, name, ha="center", fontsize=8)
    axes.text(x, -height - 0.6, f"{shape[0]} x {shape[1]}", ha="center", fontsize=7, color="0.35")


def draw_box(axes, box: tuple[float, float, float, float], **style: Any) -> None:
    x, y, width, height = box
    axes.add_patch(Rectangle((x, y), width, height, **style))


def draw_shards() -> Figure:
    figure = new_figure(11, 4.9)
    embedded = load_config(Path(EMBEDDED_MODEL))
    panels = [
        (embedded, 2, "the embedded model, 2 ranks: 6 query heads, 2 KV heads"),
        (UNEVEN, 4, "another model, 4 ranks: 8 query heads, 2 KV heads"),
    ]
    for axes, (config, size, title) in zip(figure.subplots(2, 1, height_ratios=[12, 9]), panels):
        shards = [Shard(config, rank, size) for rank in range(size)]
        for i, name in enumerate(MATRICES):
            draw_matrix(axes, SPACE * i, name, shards, config.hidden_size)
        right = SPACE * len(MATRICES)
        draw_box(axes, (right - 1.6, -0.4, 3.2, 0.4), facecolor=ALL)
        axes.text(right, 0.25, "norms", ha="center", fontsize=8)
        axes.set_xlim(-3, right + 1.7)
        longest = max(config.vocab_size / config.hidden_size, 1)
        axes.set_ylim(-3.2 * longest**0.5 - 1, 1.2)
        axes.set_aspect("equal")
        axes.set_axis_off()
        axes.set_title(title, fontsize=10, loc="left")
    handles = [Patch(color=color, label=f"rank {i}") for i, color in enumerate(RANKS)]
    handles += [
        Patch(color=ALL, label="all ranks"),
        Patch(facecolor="white", edgecolor="black", linewidth=0.6, label="zeros"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    return figure


# --- what two ranks do in a step ---


class Span(NamedTuple):
    kind: str
    begin: float
    end: float


class TimedGroup(Group):
    """Notes when this rank comes to each place where it needs others, and when it goes on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spans: list[Span] = []

    def add_up(self, x):
        return self._timed("add_up", super().add_up, x)

    def gather(self, x):
        return self._timed("gather", super().gather, x)

    def tell(self, message):
        return self._timed("tell", super().tell, message)

    def _timed(self, kind: str, function, x):
        begin = time.perf_counter()  # on Linux it is one clock for all processes
        result = function(x)
        self.spans.append(Span(kind, begin, time.perf_counter()))
        return result


def group_and_arguments(store: dist.Store, rank: int) -> tuple[TimedGroup, tuple]:
    torch.set_num_threads(1)
    config = Config(tensor_parallel_size=2, num_blocks=64, device="cpu")
    path = Path(EMBEDDED_MODEL)
    hf_config = load_config(path)
    limits = config.resolved(longest_context(hf_config), TOKENS_PER_STEP["cpu"])
    group = TimedGroup(store, rank, 2, "127.0.0.1")
    device = torch.device("cpu")
    group.connect(device)
    return group, (config, limits, hf_config, path, device)


def follow(port: int, pipe) -> None:
    """The process of rank 1."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group, arguments = group_and_arguments(store, 1)
    Follower(group, *arguments).follow()
    pipe.send(group.spans)


def recorded() -> list[list[Span]]:
    """Of each rank, in the same order: both come to the same places."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=follow, args=(store.port, theirs), daemon=True)
    process.start()
    group, arguments = group_and_arguments(store, 0)
    llm = LLM(runner=Leader(group, *arguments), num_blocks=64, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    llm.generate("Once upon a time", params, use_tqdm=False)
    end_steps(group)
    spans = [group.spans, ours.recv()]
    process.join()
    return spans


def draw_timeline() -> Figure:
    ranks = recorded()
    first, second = ranks
    assert [span.kind for span in first] == [span.kind for span in second]
    steps = [i for i, span in enumerate(first) if span.kind == "tell"][10:]

    def seconds(pair: tuple[int, int]) -> float:
        begin, end = pair
        return max(rank[end].end for rank in ranks) - min(rank[begin].end for rank in ranks)

    begin, end = min(pairwise(steps), key=seconds)  # no other program has had a processor
    zero = min(rank[begin].end for rank in ranks)

    figure = new_figure(11, 2.8)
    axes = figure.subplots()
    colors = {"compute": "#0072B2", "wait": "#DDDDDD", "add_up": "#D55E00"}
    colors |= {"gather": "#E69F00", "sample": "#56B4E9", "tell": "#CC79A7"}
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def bar(kind: str, row: int, start: float, stop: float) -> None:
        if stop > start:
            bars.setdefault((kind, row), []).append((1e3 * (start - zero), 1e3 * (stop - start)))

    for i in range(begin, end):
        both_there = max(rank[i + 1].begin for rank in ranks)
        for row, rank in enumerate(ranks):
            last, span = rank[i], rank[i + 1]
            is_sampling = last.kind == "gather" and row == 0
            bar("sample" if is_sampling else "compute", row, last.end, span.begin)
            only_sends = span.kind == "gather" and row == 1  # it does not wait
            there = span.begin if only_sends else min(both_there, span.end)
            bar("wait", row, span.begin, there)
            bar(span.kind, row, there, span.end)
    labels = {
        "compute": "computes",
        "wait": "waits for the other one",
        "add_up": "all-reduce",
        "gather": "logits to rank 0",
        "sample": "samples and plans",
        "tell": "the next step is told",
    }
    for (kind, row), times in bars.items():
        axes.broken_barh(times, (0.7 - row, 0.6), color=colors[kind], linewidth=0)
    axes.set_yticks([1, 0], ["rank 0", "rank 1"])
    axes.set_ylim(-0.5, 1.5)
    axes.set_xlim(0, 1e3 * (max(rank[end].end for rank in ranks) - zero))
    axes.set_xlabel("milliseconds; one decode step of one sequence, the embedded model")
    handles = [Patch(color=colors[kind], label=label) for kind, label in labels.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    return figure


FIGURES = {"parallel_shards": draw_shards, "parallel_timeline": draw_timeline}
