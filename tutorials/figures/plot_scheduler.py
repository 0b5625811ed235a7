"""Draws chapter 03: three ways to batch the same three requests, and the tokens of each step without
and with a budget.

    python -m tutorials.figures scheduler_batching scheduler_tokens

The second is from tutorials/results/ladder_many.json. Needs matplotlib.
"""

import json
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.config import EMBEDDED_MODEL
from tutorials.figures.fills import BLUE
from tutorials.figures.plot_ladder import cells_of
from tutorials.figures.style import HERE, TEXT, bare, new_figure, point_out, style_of, title, write
from tutorials.figures.timeline import HEIGHT, draw_timeline
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.runs import Request, Step, run_rung, seats
from tutorials.play import Job, play

# --- three ways to batch ---

ABC = [Request([7] * 6, 6), Request([8] * 20, 4), Request([9] * 5, 4)]
ARRIVALS = (0, 0, 2)  # steps


def static() -> list[Step]:
    """A and B fill a batch. C comes when it runs, and is the next one: as if there were two seats."""
    with seats(2):
        return run_rung(3, Qwen3(EMBEDDED_MODEL), ABC).steps


def scheduled(budget: int) -> list[Step]:
    """The real scheduler, with the requests of the chapter's tables."""
    jobs = [
        Job(name, arrival, len(request.prompt), request.max_tokens)
        for name, arrival, request in zip("ABC", ARRIVALS, ABC)
    ]
    steps: list[Step] = []
    for cells in play(jobs, budget=budget):
        sizes = [int(cells.get(job.name, ".").strip("*.-") or 0) for job in jobs]
        requests = [request for request, size in zip(ABC, sizes) if size]
        steps.append(Step(requests, [size for size in sizes if size]))
    return steps


def draw_batching() -> Figure:
    runs = {
        "static (rung 3)": static(),
        "continuous, whole prompts (as rung 4)": scheduled(1000),
        "continuous, in chunks, with a budget of 8 tokens": scheduled(8),
    }
    num_steps = max(map(len, runs.values()))
    figure = new_figure(8.5, 6)
    panels = figure.subplots(len(runs), 1)
    for axes, (name, steps) in zip(panels, runs.items()):
        draw_run(axes, steps, num_steps)
        most = max(step.tokens for step in steps)
        title(axes, f"{name}: {len(steps)} steps, at most {most} tokens in one")
    static_axes, whole, chunks = panels
    write(static_axes, 6.15, HEIGHT / 2 - 1, "hatched: computed for nothing")
    write(whole, 6.15, HEIGHT / 2 - 1, "B's whole prompt in step 1")
    write(chunks, 8.1, HEIGHT / 2 - 1, "B's prompt\nin four steps")
    panels[-1].set_xlabel("step", fontsize=TEXT)
    return figure


def draw_run(axes: Axes, steps: list[Step], num_steps: int) -> None:
    """A row for each request."""
    cells = [cell._replace(name="") for cell in cells_of(steps, ABC, range(len(ABC)))]
    draw_timeline(axes, cells, ["A: 6 in, 6 out", "B: 20 in, 4 out", "C: 5 in, 4 out"], num_steps)
    first = min(cell.step for cell in cells if cell.row == 2)
    write(axes, ARRIVALS[2] - 0.1, HEIGHT / 2 - 2, "comes after step 2", ha="right")
    if first > ARRIVALS[2]:
        write(axes, (ARRIVALS[2] + first) / 2, HEIGHT / 2 - 2, "waits", ha="center")


# --- tokens per step ---


def draw_tokens() -> Figure:
    tokens = json.loads((HERE.parent / "results" / "ladder_many.json").read_bytes())["runs"]
    figure = new_figure(8.5, 4)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, name in zip(panels, ("rung 4", "rung 6")):
        draw_steps(axes, tokens[name])
        total = f"{len(tokens[name])} steps, {sum(tokens[name]):,} tokens computed"
        title(axes, f"{name}: {total}")
    rung4, rung6 = panels
    most = max(tokens["rung 4"])
    at = tokens["rung 4"].index(most)
    text = f"step {at + 1}: {most} tokens, 513 of them one prompt;\nseven answers wait for it"
    point_out(rung4, text, (at + 1, most - 40), (at + 20, most - 100))
    text = "the same prompt in nine pieces, beside the answers:\nno step has more than 64 tokens"
    point_out(rung6, text, (at + 6, 70), (at + 20, 330))
    panels[-1].set_xlabel("step", fontsize=TEXT)
    figure.supylabel("tokens in the step", fontsize=TEXT)
    return figure


def draw_steps(axes: Axes, tokens: Sequence[int]) -> None:
    axes.stairs(tokens, fill=True, **style_of(BLUE) | {"edgecolor": BLUE.color})
    bare(axes, ["left", "bottom"])
    axes.set_xlim(0, 480)
    axes.set_ylim(0, 560)
    axes.set_xticks(range(0, 451, 50))
    axes.set_yticks([0, 64, 250, 500])


FIGURES = {"scheduler_batching": draw_batching, "scheduler_tokens": draw_tokens}
