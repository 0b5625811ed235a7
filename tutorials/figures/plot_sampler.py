"""Draws the example of chapter 08: six words through the filters, and the numbers on the line, with the
engine's own `lowest_kept` and `uniform`.

    python -m tutorials.figures sampler_filters sampler_draw

Needs matplotlib and torch.
"""

from itertools import accumulate

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.layers.sampler import Sampling, lowest_kept, uniform
from tutorials.figures.fills import EMPTY, SKY, WASTE, Fill
from tutorials.figures.style import SMALL, bare, box, new_figure, title, write

WORDS = ["fox", "cat", "dog", "hen", "owl", "elk"]
PROBS = [0.40, 0.25, 0.15, 0.10, 0.06, 0.04]
FILTERS: dict[str, float] = {"temperature": 0.5, "min_p": 0.05, "top_k": 3, "top_p": 0.9}
SEED = 3
POSITIONS = range(7, 11)


def probabilities(temperature: float) -> list[float]:
    return (torch.tensor(PROBS).log() / temperature).softmax(0).tolist()


def kept(**options: float) -> list[bool]:
    """Which words are kept with these options."""
    columns = {"temperature": 1.0, "seed": SEED, "position": 7} | options
    sampling = Sampling(**{name: torch.tensor([value]) for name, value in columns.items()})
    logits = torch.tensor([PROBS]).log()
    lowest = lowest_kept(logits, sampling)
    return (logits >= lowest)[0].tolist()


# --- the filters ---


def draw_bars(axes: Axes, probs: list[float], before: list[bool], after: list[bool]) -> None:
    """A word that this filter cuts off is hatched. One that is gone already has no bar."""
    for i, prob in enumerate(probs):
        y = len(probs) - 1 - i
        if not before[i]:
            continue
        box(axes, 0, y - 0.38, prob, 0.76, SKY if after[i] else WASTE)
        write(axes, prob + 0.03, y, f"{prob:.3f}" + ("" if after[i] else "  cut off"))
    axes.set_xlim(0, 0.98)
    axes.set_ylim(-0.6, 6.5)
    bare(axes, ["left"])
    axes.set_yticks([])


def draw_filters() -> Figure:
    figure = new_figure(9.5, 3.2)
    panels = figure.subplots(1, 5)
    for i, word in enumerate(WORDS):
        write(panels[0], -0.06, 5 - i, word, ha="right")
    draw_bars(panels[0], PROBS, kept(), kept())
    title(panels[0], "the model")
    sharp = probabilities(FILTERS["temperature"])
    left = sum(sharp[:3])
    rules = {
        "temperature": "squared, then divided\nby the new sum",
        "min_p": f"at least 0.05 of the\nlikeliest: {0.05 * sharp[0]:.3f}",
        "top_k": "the three likeliest",
        "top_p": f"until 0.9 of the {left:.3f}\nthat is left: {0.9 * left:.3f}",
    }
    options: dict[str, float] = {}
    for axes, (name, value) in zip(panels[1:], FILTERS.items()):
        before = kept(**options)
        options[name] = value
        draw_bars(axes, probabilities(options["temperature"]), before, kept(**options))
        title(axes, f"{name} {value}")
        write(axes, 0.03, 6.2, rules[name], va="top", fontsize=SMALL)
    return figure


# --- the number on the line ---


def draw_line(axes: Axes, y: float, weights: list[float], numbers: dict[int, float]) -> None:
    """The words as parts of a line, and an arrow for each number, which falls on one of them."""
    total = sum(weights)
    begin = 0.0
    for word, weight in zip(WORDS, weights):
        if weight:
            box(axes, begin, y, weight, 0.5, FILLS[word], word)
        begin += weight
    for so_far in [0.0, *accumulate(w for w in weights if w)]:
        digits = 2 if total > 0.999 else 3
        write(axes, so_far, y - 0.18, f"{so_far:.{digits}f}", ha="center", fontsize=SMALL)
    for position, number in numbers.items():
        at = number * total
        arrow = {"arrowstyle": "->", "shrinkA": 1, "shrinkB": 0}
        place = {"ha": "center", "va": "bottom", "fontsize": SMALL, "arrowprops": arrow}
        note = f"position {position}\n{number:.3f}"
        if total < 0.999:
            note += f" x {total:.3f}"
        axes.annotate(note, (at, y + 0.5), (at, y + 0.85), **place)


FILLS: dict[str, Fill] = {
    word: fill for word, fill in zip(WORDS, [SKY, EMPTY, SKY, EMPTY, SKY, EMPTY])
}


def draw_draw() -> Figure:
    positions = torch.tensor(POSITIONS)
    numbers = uniform(torch.full_like(positions, SEED), positions).tolist()
    by_position = dict(zip(POSITIONS, numbers))
    weights = [p * keep for p, keep in zip(probabilities(0.5), kept(**FILTERS))]
    figure = new_figure(8.5, 3.5)
    above, below = figure.subplots(2, 1)
    for axes, parts, name in (
        (above, PROBS, "all six words: the line ends at 1"),
        (
            below,
            weights,
            "after the filters: the line ends at 0.855; the same numbers, times 0.855",
        ),
    ):
        draw_line(axes, 0, parts, by_position)
        title(axes, name)
        axes.set_xlim(-0.03, 1.03)
        bare(axes)
    above.set_ylim(-0.3, 1.35)
    below.set_ylim(-0.3, 1.35)
    return figure


FIGURES = {"sampler_filters": draw_filters, "sampler_draw": draw_draw}
