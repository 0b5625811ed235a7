"""Draws what draft tokens bring: which were accepted in chapter 22's answer, and the gain under load.

    python -m tutorials.figures guesses_steps guesses_gain

guesses_steps runs the engine. Needs matplotlib.
"""

import json

from matplotlib.figure import Figure

from nanovllm import LLM, SamplingParams
from nanovllm.topics.decoding.drafts import Draft
from tutorials.figures.fills import GREEN, SKY, WASTE
from tutorials.figures.style import HERE, SMALL, bare, box, new_figure, write

QUESTION = [{"role": "user", "content": "sort 31, 47, 52, 60, 74, 88, 93, 12"}]
REPORT = HERE.parent / "results" / "cpu_speculative.json"
SHOWN = {"sort": "o-", "phone book": "s-", "reverse": "^--", "story": "D:"}


def steps() -> list[tuple[list[int], int, int]]:
    """Of each step: the draft, how many of its tokens were accepted, and the token drawn behind them."""
    llm = LLM(speculative_config={})
    found = []

    def observe(schedule, seconds):
        (item,) = schedule.items
        draft = []
        if isinstance(item.seq, Draft):
            draft = item.seq.token_ids[-item.seq.place :]
        num_accepted = len(schedule.sampled) - 1
        found.append((draft, num_accepted, seq.token_ids[-1]))

    llm.observers.append(observe)
    llm.add_request({"messages": QUESTION}, SamplingParams(temperature=0, max_tokens=40), "0")
    (seq,) = llm.requests["0"].sequences
    while llm.has_unfinished():
        llm.step()
    return found


def draw_steps() -> Figure:
    """A column for each step: the draft tokens from below, and the step's own token on top."""
    found = steps()
    tokenizer = LLM().get_tokenizer()
    figure = new_figure(7, 3.2)
    axes = figure.subplots()

    def cell(step, height, token_id, fill):
        box(axes, step - 0.45, height, 0.9, 0.9, fill)
        text = tokenizer.decode([token_id]).replace(" ", "\u2423").replace("\n", "\\n")
        write(axes, step, height + 0.45, "end" if text.startswith("<") else text, fill, ha="center")

    for step, (draft, num_accepted, own) in enumerate(found, 1):
        for i, token_id in enumerate(draft):
            cell(step, i + (i >= num_accepted), token_id, SKY if i < num_accepted else WASTE)
        cell(step, num_accepted, own, GREEN)
    axes.set_xlim(0.3, len(found) + 0.7)
    axes.set_ylim(0, 6.6)
    for x, (text, fill) in zip(
        (0.55, 4.2, 7.4), (("drawn", GREEN), ("accepted", SKY), ("rejected", WASTE))
    ):
        box(axes, x, 5.75, 0.5, 0.6, fill)
        write(axes, x + 0.65, 6.05, text, ha="left")
    axes.set_xticks(range(1, len(found) + 1))
    axes.set_yticks([])
    axes.set_xlabel("step")
    bare(axes, ["bottom"])
    return figure


def draw_gain() -> Figure:
    """A line for each kind of answer: tokens per second with four draft tokens, over those without."""
    rows = json.loads(REPORT.read_bytes())["speculative"]
    speeds = {
        (row["task"], row["at_a_time"], row["guesses"]): row["tokens_per_second"] for row in rows
    }
    counts = sorted({row["at_a_time"] for row in rows})
    figure = new_figure(6, 3.2)
    axes = figure.subplots()
    axes.axhline(1, color="0.6", linewidth=1, label="no draft tokens")
    axes.text(len(counts) - 0.94, 0.98, "no draft tokens", ha="left", va="top", fontsize=SMALL)
    for task, style in SHOWN.items():
        gains = [speeds[task, n, 4] / speeds[task, n, 0] for n in counts]
        axes.plot(
            range(len(counts)), gains, style, color="black", markersize=5, linewidth=1, label=task
        )
        axes.text(0.04, gains[0] + 0.03, task, ha="left", va="bottom", fontsize=SMALL)
    axes.set_xlim(-0.2, len(counts) - 0.6)
    axes.set_ylim(0, 2.1)
    axes.set_xticks(range(len(counts)), [str(n) for n in counts])
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("times as fast")
    bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"guesses_steps": draw_steps, "guesses_gain": draw_gain}
