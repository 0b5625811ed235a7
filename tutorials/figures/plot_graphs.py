"""Draws what chapter 11 counts and computes: one layer's operations, launched one by one and replayed,
and the memory of a GPU.

    python -m tutorials.figures graphs_replay graphs_memory

The operations are taken from the embedded model's first layer, in a real step. How long each takes is
made up: nothing was run on a GPU. The bytes follow from the shapes of Qwen3-0.6B. Needs matplotlib.
"""

from functools import partial

import torch
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config, Limits
from nanovllm.device.cuda_graphs import graph_sizes
from nanovllm.layers.linear import Linear
from nanovllm.topics.simulator.cost_model import SHAPES, shape_of
from tutorials.figures.fills import BLUE, GREEN, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, bare, box, new_figure, point_out, title, write

# --- ten operations ---

LABELS = {  # of functions of Ops, and of matrices
    "add_and_norm": "add,\nnorm",
    "qkv_proj": "qkv",
    "norm_and_rotate": "norm,\nrotate",
    "store_kv": "store",
    "paged_attention": "atten-\ntion",
    "o_proj": "o",
    "gate_up_proj": "gate,\nup",
    "silu_and_mul": "silu,\nmul",
    "down_proj": "down",
}


class Noted:
    """Ops that note their names."""

    def __init__(self, ops, calls: list[str]):
        self.ops = ops
        self.calls = calls

    def __getattr__(self, name: str):
        def call(*args):
            self.calls.append(name)
            return getattr(self.ops, name)(*args)

        return call


def operations() -> list[str]:
    """What one layer asks of the device in a decode, in order."""
    llm = LLM(num_blocks=16, block_size=4, device="cpu")
    llm.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    llm.step()
    calls: list[str] = []
    layer = llm.runner.model.model.layers[0]
    for name, module in layer.named_modules():
        if hasattr(module, "ops"):
            module.ops = Noted(module.ops, calls)
        if isinstance(module, Linear):
            module.register_forward_pre_hook(
                lambda module, args, name=name: calls.append(name.split(".")[-1])
            )
    llm.step()
    return calls


LAUNCH, RUN = 1.0, 0.42  # made up


def draw_replay() -> Figure:
    calls = operations()
    figure = new_figure(8.5, 4.2)
    above, below = figure.subplots(2, 1)
    for i, name in enumerate(calls):
        box(above, i * LAUNCH, 1, LAUNCH, 0.8, SKY, LABELS[name])
        end = (i + 1) * LAUNCH
        if i:
            box(above, end - LAUNCH + RUN, 0, LAUNCH - RUN, 0.6, WASTE)
        box(above, end, 0, RUN, 0.6, GREEN, i + 1)
        above.annotate("", (end, 0.6), (end, 1), arrowprops={"arrowstyle": "->", "shrinkB": 0})
    num = len(calls)
    title(
        above,
        f"eager: Python launches the {num} operations of a layer, and the device waits (hatched)",
    )
    box(below, 0, 1, 0.8, 0.8, ORANGE, "copy")
    box(below, 0.8, 1, LAUNCH, 0.8, SKY, "replay")
    box(below, 0.8, 0, 0.3, 0.6, ORANGE)
    arrow = partial(below.annotate, "", arrowprops={"arrowstyle": "->", "shrinkB": 0})
    arrow((0.8, 0.6), (0.8, 1))
    begin = 0.8 + LAUNCH
    arrow((begin, 0.6), (begin, 1))
    for i in range(num):
        box(below, begin + i * RUN, 0, RUN, 0.6, GREEN, i + 1)
    title(below, "replayed: the inputs are copied to their places, then one launch starts all")
    note = "operations: counted in the code; lengths: made up"
    write(below, num * LAUNCH + RUN, 1.4, note, ha="right", fontsize=SMALL)
    for axes in (above, below):
        write(axes, -0.1, 1.4, "Python", ha="right")
        write(axes, -0.1, 0.3, "device", ha="right")
        axes.set_xlim(-1.0, num * LAUNCH + RUN + 0.1)
        axes.set_ylim(-0.15, 1.95)
        bare(axes)
    return figure


# --- the memory of a GPU ---

GIB = 2**30
TOTAL = 24
ENLARGED = 1.5
LIMITS = Limits(max_model_len=40_960, max_num_seqs=256, max_num_batched_tokens=8192)


def parts() -> dict[str, float]:
    """GiB, as the chapter computes them."""
    sizes = SHAPES["qwen3-0.6b"]
    shape = shape_of(sizes, itemsize=torch.bfloat16.itemsize)
    per_token = (5 * sizes["hidden_size"] + 3 * sizes["intermediate_size"]) * shape.itemsize
    found = {
        "weights": shape.weight_bytes,
        "step": LIMITS.max_num_batched_tokens * per_token,
        "recording": graph_sizes(LIMITS)[-1] * per_token,
    }
    found["granted"] = int(Config().gpu_memory_utilization * TOTAL * GIB)
    found["block"] = 16 * shape.kv_bytes
    return {name: num_bytes / GIB for name, num_bytes in found.items()}


def draw_memory() -> Figure:
    gib = parts()
    used = gib["weights"] + gib["step"] + gib["recording"]
    left = gib["granted"] - used
    figure = new_figure(8.5, 2.9)
    above, below = figure.subplots(2, 1, height_ratios=[1, 1.4])
    box(above, 0, 0, used, 0.6, BLUE)
    cache = f"KV cache: {left:.1f} GiB, {int(left / gib['block']):,} blocks"
    box(above, used, 0, left, 0.6, SKY, cache)
    free = TOTAL - gib["granted"]
    box(above, gib["granted"], 0, free, 0.6, WASTE, f"free: {free:.1f}")
    title(above, f"the {TOTAL} GiB of a GPU with Qwen3-0.6B in bfloat16")
    above.set_xlim(-0.1, TOTAL + 0.1)
    above.set_ylim(-0.1, 0.7)
    named: list[tuple[str, str, Fill]] = [
        ("weights", f"weights: {gib['weights']:.2f}", BLUE),
        ("step", f"a step of\n8,192 tokens:\n{gib['step']:.2f}", ORANGE),
        ("recording", "", GREEN),
    ]
    x = 0.0
    for name, label, fill in named:
        box(below, x, 0, gib[name], 0.6, fill, label)
        x += gib[name]
    box(below, x, 0, ENLARGED - x, 0.6, SKY, "KV cache")
    place = (x - gib["recording"] / 2, 0)
    point_out(below, f"largest recording: {gib['recording']:.2f}", place, (1.12, -0.3))
    write(below, 0, -0.3, f"the first {ENLARGED} GiB, enlarged")
    below.set_xlim(-0.1 * ENLARGED / TOTAL, ENLARGED * (1 + 0.1 / TOTAL))
    below.set_ylim(-0.45, 0.7)
    for axes in (above, below):
        bare(axes)
    for x in (0.0, ENLARGED):
        coords = {"coordsA": "data", "coordsB": "data", "axesA": above, "axesB": below}
        figure.add_artist(ConnectionPatch((x, 0), (x, 0.6), **coords, color="0.5"))
    return figure


FIGURES = {"graphs_replay": draw_replay, "graphs_memory": draw_memory}
