"""Draws chapter 09: what becomes of each token of an answer with an emoji and a stop string, and the parts of
two steps.

    python -m tutorials.figures engine_text engine_steps

The first is a run of the real `Text`, the second reads tutorials/results/step_parts.json. Needs matplotlib
and the embedded model's tokenizer.
"""

import json
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from nanovllm import SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.processing.outputs import CompletionOutput
from nanovllm.processing.text import Text
from tutorials.figures.fills import BLUE, EMPTY, GREEN, ORANGE, SKY, WASTE, Fill
from tutorials.figures.style import HERE, SMALL, bare, box, new_figure, point_out, title, write

RESULT = HERE.parent / "results" / "step_parts.json"
ANSWER = "a fox \N{GRINNING FACE}\nUp\nUser:"
STOP = "\nUser:"

# --- the text ---


class Moment(NamedTuple):
    """After one token."""

    alone: str  # what the token is, decoded by itself
    num_bytes: int  # of a character that is not complete yet
    held: str  # decoded, and not sent
    sent: str  # by this token


def run() -> list[Moment]:
    tokenizer = Tokenizer.from_file(str(Path(EMBEDDED_MODEL) / "tokenizer.json"))
    output = CompletionOutput(0)
    text = Text(tokenizer, output, SamplingParams(stop=STOP))
    moments: list[Moment] = []
    num_sent = num_bytes = 0
    for token in tokenizer.encode(ANSWER).ids:
        before = output.text
        text.add(token)
        num_bytes = num_bytes + 1 if output.text == before else 0
        new = output.text[num_sent : text.num_safe_chars]
        num_sent = text.num_safe_chars
        alone = tokenizer.decode([token])
        moments.append(Moment(alone, num_bytes, output.text[num_sent:], new))
    return moments


def shown(text: str) -> str:
    return text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}").replace(" ", "\u2423")


def draw_text() -> Figure:
    moments = run()
    figure = new_figure(9.5, 2.9)
    axes = figure.subplots()
    lanes = {"token": 3.3, "each alone, at once": 2.3, "waits after it": 1.3, "sent": 0.3}
    for name, y in lanes.items():
        write(axes, -0.2, y, name, ha="right")
    for i, moment in enumerate(moments):
        write(axes, i + 0.45, lanes["token"], i + 1, ha="center", fontsize=SMALL)
        is_wrong = moment.alone == "\N{REPLACEMENT CHARACTER}"
        is_late = i >= len(moments) - 5
        fill = ORANGE if is_wrong or is_late else SKY
        box(axes, i, lanes["each alone, at once"] - 0.3, 0.9, 0.6, fill, shown(moment.alone))
        waiting = f"{moment.num_bytes}" if moment.num_bytes else shown(moment.held)
        if waiting:
            many = "byte" if waiting == "1" else "bytes"
            label = f"{waiting}\n{many}" if moment.num_bytes else waiting
            box(axes, i, lanes["waits after it"] - 0.3, 0.9, 0.6, WASTE)
            write(
                axes, i + 0.45, lanes["waits after it"], label, WASTE, ha="center", fontsize=SMALL
            )
        if moment.sent:
            box(axes, i, lanes["sent"] - 0.3, 0.9, 0.6, GREEN, shown(moment.sent))
    end = len(moments) - 1
    box(axes, end, lanes["waits after it"] - 0.3, 0.9, 0.6, EMPTY, "end")
    note = "the stop string is complete,\nand never sent"
    point_out(axes, note, (end + 0.45, 1.0), (end - 1.8, 0.3), ha="center", fontsize=SMALL)
    write(axes, 5, 2.85, "four wrong characters", ha="center", fontsize=SMALL)
    write(axes, 12.5, 2.85, "sent, and should not be", ha="center", fontsize=SMALL)
    axes.set_xlim(-2.6, len(moments))
    axes.set_ylim(-0.15, 3.6)
    bare(axes)
    return figure


# --- two steps ---

PARTS: dict[str, Fill] = {
    "settle": EMPTY,
    "plan": SKY,
    "run": BLUE,
    "update": ORANGE,
    "deliver": GREEN,
}


def draw_line(axes: Axes, steps: list[dict[str, float]]) -> float:
    """The parts of the steps, one after the other, in milliseconds. Returns where the first ends."""
    x = 0.0
    ends = []
    for step in steps:
        for name, fill in PARTS.items():
            width = 1000 * step[name]
            label = ""
            if name == "run":
                label = f"run: {step['tokens']:.0f} tokens, {width:.1f} ms"
            box(axes, x, 0, width, 1, fill, label)
            x += width
        ends.append(x)
    axes.set_xlim(0, x)
    axes.set_ylim(-0.8, 1.1)
    return ends[0]


def draw_gap(axes: Axes, before: dict[str, float], after: dict[str, float]) -> None:
    """What lies between two runs."""
    x = 0.0
    for step, name in ((before, "update"), (before, "deliver"), (after, "settle"), (after, "plan")):
        width = 1000 * step[name]
        if name == "settle":
            at = (x + width / 2, 1)
            point_out(axes, f"settle\n{width:.3f}", at, (at[0], 1.7), ha="center", fontsize=SMALL)
            box(axes, x, 0, width, 1, PARTS[name])
        else:
            box(axes, x, 0, width, 1, PARTS[name], f"{name}\n{width:.3f} ms")
        x += width
    axes.set_xlim(0, x)
    axes.set_ylim(-0.05, 1.9)


def draw_steps() -> Figure:
    steps = json.loads(RESULT.read_bytes())["steps"]
    figure = new_figure(8.5, 3.6)
    above, below = figure.subplots(2, 1, height_ratios=[1.2, 1.4])
    gap_at = draw_line(above, steps)
    point_out(above, "enlarged below", (gap_at, 0), (gap_at, -0.6), ha="center", fontsize=SMALL)
    title(above, "two steps: a prompt of 50 tokens and 8 decodes, then 9 decodes")
    draw_gap(below, *steps)
    gap = sum(1000 * steps[0][n] for n in ("update", "deliver"))
    gap += sum(1000 * steps[1][n] for n in ("settle", "plan"))
    title(below, f"between the two runs, enlarged: {gap:.2f} ms in which the model does not run")
    for axes in (above, below):
        bare(axes)
    return figure


FIGURES = {"engine_text": draw_text, "engine_steps": draw_steps}
