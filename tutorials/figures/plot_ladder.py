"""Draws runs of the ladder: which seat each request has and what it computes in each step, and the slots of the
cache that are held and used.

    python -m tutorials.figures ladder_seats ladder_slots

Needs matplotlib.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_letters

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.config import EMBEDDED_MODEL
from tutorials.figures.fills import BLUE, EMPTY, ORANGE, WASTE
from tutorials.figures.style import TEXT, bare, new_figure, style_of, title, write
from tutorials.figures.timeline import HEIGHT, Cell, draw_timeline, fill_of
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.runs import (
    Request,
    Run,
    Step,
    four_requests,
    many_requests,
    new_llm,
    run_rung,
    seats,
)

DRAWN = ("rung 3", "rung 4", "rung 6")
NUM_SEATS = 3
MOST_STEPS = 20  # for which there is room

# --- seats ---


def name_of(i: int) -> str:
    return ascii_letters.swapcase()[i] if i < len(ascii_letters) else f"#{i}"


def seats_of(steps: list[Step], requests: list[Request]) -> dict[int, int]:
    """The seat of each request: a free one when it first computes, until its last step."""
    present = [[requests.index(request) for request in step.requests] for step in steps]
    last = {i: t for t, indices in enumerate(present) for i in indices}
    found: dict[int, int] = {}
    for t, indices in enumerate(present):
        taken = {found[i] for i in found if last[i] >= t}
        for i in indices:
            if i not in found:
                found[i] = min(set(range(len(taken) + 1)) - taken)
                taken.add(found[i])
    return found


def cells_of(
    steps: list[Step], requests: list[Request], rows: Mapping[int, int] | Sequence[int] = ()
) -> list[Cell]:
    """What was needed of each step: tokens of the prompt, and of the answer all but the last, each
    once. A row is a seat, if nothing else is said."""
    rows = rows or seats_of(steps, requests)
    computed = [0] * len(requests)
    known = [len(request.prompt) for request in requests]
    cells = []
    for t, step in enumerate(steps):
        for request, size in zip(step.requests, step.sizes):
            i = requests.index(request)
            end = min(known[i], len(request.prompt) + request.max_tokens - 1)
            needed = min(size, end - computed[i])
            computed[i] += needed
            known[i] += computed[i] == known[i]  # it gets a token
            cells.append(Cell(rows[i], t, name_of(i), fill_of(i), needed, size - needed))
    return cells


def draw_runs(runs: dict[str, Run], requests: list[Request]) -> Figure:
    """A panel for each run, with the first steps of all."""
    num_steps = min(MOST_STEPS, max(len(runs[name].steps) for name in DRAWN))
    num_rows = [1 + max(seats_of(runs[name].steps, requests).values()) for name in DRAWN]
    figure = new_figure(1.2 + 0.66 * num_steps, 0.5 * sum(num_rows) + 0.55 * len(DRAWN))
    panels = figure.subplots(len(DRAWN), 1, height_ratios=num_rows)
    for axes, name, rows in zip(panels, DRAWN, num_rows):
        draw_run(axes, name, runs[name], requests, rows, num_steps)
    panels[-1].set_xlabel("step", fontsize=TEXT)
    return figure


def draw_run(
    axes: Axes, name: str, run: Run, requests: list[Request], rows: int, num_steps: int
) -> None:
    cells = [cell for cell in cells_of(run.steps, requests) if cell.step < num_steps]
    draw_timeline(axes, cells, [f"seat {row + 1}" for row in range(rows)], num_steps)
    tokens = [step.tokens for step in run.steps]
    text = (
        f"{len(tokens):,} steps, {sum(tokens):,} tokens computed, at most {max(tokens):,} in a step"
    )
    title(axes, f"{name}: {text}")


def draw_seats() -> Figure:
    model = Qwen3(EMBEDDED_MODEL)
    requests = four_requests(new_llm())
    with seats(NUM_SEATS):
        runs = {name: run_rung(int(name[-1]), model, requests) for name in DRAWN}
    figure = draw_runs(runs, requests)
    notes = (  # in a row that is empty from this step on
        (1, 6, "hatched: computed for nothing"),
        (2, 6, "D waits until all of them have ended"),
        (1, 4, "D enters as soon as C has left"),
        (2, 4, "C's prompt in two steps: no step above 64"),
    )
    rung3, rung4, rung6 = figure.axes
    for axes, (row, step, note) in zip((rung3, rung3, rung4, rung6), notes):
        write(axes, step + 0.15, HEIGHT / 2 - row, note)
    return figure


# --- slots that are held and used ---

HELD = {  # where to write it, in slots, and what is held
    "rung 3": (930, WASTE, "held: room for the longest prompt and the longest answer"),
    "rung 4": (800, WASTE, "held: room for the longest request, in each seat"),
    "rung 5": (650, EMPTY, "held: blocks for the tokens that are there"),
}


def ended_slots(steps: list[Step], requests: list[Request]) -> list[int]:
    """In each step the slots of requests that compute on although their answer is complete."""
    found = [0] * len(steps)
    computed: Counter[str] = Counter()
    for cell in cells_of(steps, requests):
        computed[cell.name] += cell.needed or cell.wasted
        if not cell.needed:
            found[cell.step] += computed[cell.name]
    return found


def draw_slots() -> Figure:
    model = Qwen3(EMBEDDED_MODEL)
    requests = many_requests()[:16]
    figure = new_figure(8.5, 5.4)
    panels = figure.subplots(len(HELD), 1, sharex=True, sharey=True)
    for axes, (name, (slots, fill, note)) in zip(panels, HELD.items()):
        steps = run_rung(int(name[-1]), model, requests).steps
        ended = ended_slots(steps, requests)
        draw_run_slots(axes, name, steps, ended)
        write(axes, 2, slots, note, fill)
        write(axes, 45, 130, "used", BLUE, ha="center")
        if any(ended):
            write(axes, 94, 560, "used for answers\nthat are complete", ORANGE, ha="right")
    panels[-1].set_xlabel("step", fontsize=TEXT)
    figure.supylabel("slots of the cache", fontsize=TEXT)
    return figure


def draw_run_slots(axes: Axes, name: str, steps: list[Step], ended: list[int]) -> None:
    """What is used is drawn over what is held."""
    held = [step.held for step in steps]
    used = [step.used for step in steps]
    needed = [u - e for u, e in zip(used, ended)]
    text = f"{name}: {len(steps)} steps, {sum(used) / sum(held):.0%} of the held slots are used"
    if any(ended):
        text += f", {sum(needed) / sum(held):.0%} for answers in progress"
    title(axes, text)
    for values, fill in ((held, WASTE), (used, ORANGE), (needed, BLUE)):
        axes.stairs(values, fill=True, **style_of(fill))
    bare(axes, ["left", "bottom"])
    axes.set_xlim(0, 180)
    axes.set_ylim(0, 1100)
    axes.set_xticks(range(0, 176, 25))
    axes.set_yticks([0, 500, 1000])


FIGURES = {"ladder_seats": draw_seats, "ladder_slots": draw_slots}
