"""Draws what chapter 05 is about: a decoder layer with the shapes of a real run, and tokens in a rectangle and in a row.

    python -m tutorials.figures model_layer model_flat

Needs matplotlib and torch.
"""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.config import EMBEDDED_MODEL
from tutorials.figures.fills import BLUE, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, bare, box, new_figure, title, write
from tutorials.ladder.qwen3 import Qwen3, attention

A = ["Once", "upon", "a", "time", ","]
B = ["In", "a", "village"]
NINE = [300, 40] + [1] * 7  # tokens of the nine requests


# --- a layer ---


class Shapes(Qwen3):
    """Remembers the shape of what the first layer computes."""

    def __init__(self):
        super().__init__(EMBEDDED_MODEL)
        self.found: dict[str, str] = {}

    def linear(self, name, x):
        return self.keep(name, super().linear(name, x))

    def norm(self, name, x):
        return self.keep(name, super().norm(name, x))

    def attend(self, layer, q, k, v):
        return self.keep(f"layers.{layer}.attend", attention(q, k, v))

    def keep(self, name, y):
        if name.startswith("layers.0."):
            self.found[name.rpartition(".")[2]] = str(list(y.shape))
        return y


def shapes() -> dict[str, str]:
    """By the last part of the name, for eight rows."""
    model = Shapes()
    model.logits(torch.arange(8), torch.arange(8), model.attend)
    return model.found


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style) -> None:
    style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "color": "black"} | style
    axes.annotate("", end, start, arrowprops=style)


def operation(
    axes: Axes, x: float, y: float, name: str, fill: Fill = SKY, width: float = 1
) -> None:
    """A box around this place."""
    box(axes, x - width / 2, y - 0.2, width, 0.4, fill, name)


def plus(axes: Axes, x: float, y: float) -> None:
    style = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "black"}
    write(axes, x, y, "+", ha="center", fontsize=13, bbox=style)


def shape(axes: Axes, x: float, y: float, text: str, **style) -> None:
    write(axes, x, y, text, **{"fontsize": SMALL, "ha": "center", "family": "monospace"} | style)


def draw_layer() -> Figure:
    found = shapes()
    figure = new_figure(8.5, 4.6)
    axes = figure.subplots()
    stream = 4.0
    arrow(axes, (0.1, stream), (11.9, stream), linewidth=4, color="0.35")
    shape(axes, 0.1, stream + 0.3, f"x {found['input_layernorm']}", ha="left")
    write(axes, 3.3, stream + 0.3, "the residual stream: it is only added to", ha="center")
    shape(axes, 11.9, stream + 0.3, f"x {found['down_proj']}", ha="right")
    draw_attention(axes, found, stream)
    draw_mlp(axes, found, stream)
    axes.set_xlim(0, 12)
    axes.set_ylim(-0.1, 4.6)
    bare(axes)
    return figure


def draw_attention(axes: Axes, found: dict[str, str], stream: float) -> None:
    """From the left end of the stream down, and up again in its middle."""
    arrow(axes, (0.7, stream), (0.7, 3.5))
    operation(axes, 0.7, 3.3, "norm")
    for x, name, rows in ((0.7, "q", "6 heads"), (2.2, "k", "2 heads"), (3.7, "v", "2 heads")):
        arrow(axes, (0.7, 3.1), (x, 2.7))
        operation(axes, x, 2.5, f"{name}_proj")
        shape(axes, x + 0.08, 2.17, found[f"{name}_proj"], ha="left")
        if name != "v":
            arrow(axes, (x, 2.3), (x, 1.7))
            operation(axes, x, 1.5, "norm, rotate", width=1.25)
            shape(axes, x + 0.08, 1.17, found[f"{name}_norm"], ha="left")
            arrow(axes, (x, 1.3), (x, 0.7))
        else:
            arrow(axes, (x, 2.3), (x, 0.7))
            shape(axes, x + 0.08, 1.17, found["k_norm"], ha="left")
        write(axes, x + 0.08, 0.88, rows, fontsize=SMALL)
    box(axes, 0.2, 0.3, 4.4, 0.4, BLUE, "attend: the only line that looks at other rows")
    arrow(axes, (4.6, 0.5), (5.7, 0.5))
    arrow(axes, (5.7, 0.5), (5.7, 2.3))
    shape(axes, 5.75, 1.4, found["attend"], ha="left")
    operation(axes, 5.7, 2.5, "o_proj")
    arrow(axes, (5.7, 2.7), (5.7, stream - 0.1))
    shape(axes, 5.75, 3.2, found["o_proj"], ha="left")
    plus(axes, 5.7, stream)


def draw_mlp(axes: Axes, found: dict[str, str], stream: float) -> None:
    arrow(axes, (7.4, stream), (7.4, 3.5))
    operation(axes, 7.4, 3.3, "norm")
    for x, name in ((7.4, "gate"), (9.0, "up")):
        arrow(axes, (7.4, 3.1), (x, 2.7))
        operation(axes, x, 2.5, f"{name}_proj")
        shape(axes, x + 0.08, 2.17, found[f"{name}_proj"], ha="left")
        arrow(axes, (x, 2.3), (x, 1.7))
    box(axes, 6.9, 1.3, 2.6, 0.4, SKY, "silu(gate) * up")
    arrow(axes, (9.5, 1.5), (11.0, 1.5))
    arrow(axes, (11.0, 1.5), (11.0, 2.3))
    shape(axes, 10.25, 1.32, found["up_proj"])
    operation(axes, 11.0, 2.5, "down_proj", width=1.15)
    arrow(axes, (11.0, 2.7), (11.0, stream - 0.1))
    shape(axes, 10.95, 3.2, found["down_proj"], ha="right")
    plus(axes, 11.0, stream)
    write(axes, 8.2, 0.5, "all other lines compute a row\nfrom this row alone")


# --- a rectangle and a row ---


def draw_flat() -> Figure:
    figure = new_figure(8.5, 5.2)
    above, below = figure.subplots(2, 1, height_ratios=[1, 1.2])
    draw_two(above)
    draw_nine(below)
    return figure


def draw_two(axes: Axes) -> None:
    title(axes, "two texts: ten cells, or eight")
    for row, (name, text, fill) in enumerate((("a", A, SKY), ("b", B, ORANGE))):
        y = 2.7 - 0.5 * row
        write(axes, -0.15, y + 0.25, name, ha="right")
        for i in range(len(A)):
            empty = i >= len(text)
            box(axes, i, y, 1, 0.5, WASTE if empty else fill, "" if empty else text[i])
    write(axes, 5.2, 2.7, "the column is the position;\ntwo cells are empty")
    for y, label in ((1.15, "flat"), (0.65, "row of x"), (0.25, "position")):
        write(axes, -0.15, y, label, ha="right")
    for row, token in enumerate(A + B):
        box(axes, row, 0.9, 1, 0.5, SKY if row < len(A) else ORANGE, token)
        write(axes, row + 0.5, 0.65, row, ha="center")
        write(axes, row + 0.5, 0.25, row if row < len(A) else row - len(A), ha="center")
    axes.set_xlim(-1.1, 8.3)
    axes.set_ylim(0, 3.3)
    bare(axes)


def draw_nine(axes: Axes) -> None:
    longest = max(NINE)
    rectangle = len(NINE) * longest
    title(axes, f"nine requests: {rectangle:,} cells, or {sum(NINE)}")
    for row, length in enumerate(NINE):
        y = -row
        box(axes, 0, y, length, 1, BLUE)
        if length < longest:
            box(axes, length, y, longest - length, 1, WASTE)
        label = f"{length} token{'s' * (length > 1)}"
        write(axes, -3, y + 0.5, label, ha="right", fontsize=SMALL)
    note = f"{rectangle - sum(NINE):,} cells are computed for nothing"
    write(axes, 180, -3.5, note, WASTE, ha="center")
    left = 0
    for length in NINE:
        box(axes, left, -11, length, 1.2, BLUE)
        left += length
    write(axes, -3, -10.4, "flat", ha="right", fontsize=SMALL)
    write(axes, left + 3, -10.4, left)
    axes.set_xlim(-48, 372)
    axes.set_ylim(-11.4, 1.2)
    bare(axes)


FIGURES = {"model_layer": draw_layer, "model_flat": draw_flat}
