"""Draws the replicas of chapter 19: what each turn of three conversations computes, and how far a router
should follow a prefix.

    python -m tutorials.figures replicas_turns replicas_bounds

The first one simulates the turns, the second one reads tutorials/results/replicas.json. Needs matplotlib.
"""

import json

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import PrefixAffinity, RoundRobin, Router, Served, simulate
from nanovllm.config import Config
from tutorials.figures.fills import ORANGE, SKY, WASTE
from tutorials.figures.style import (
    HERE,
    SMALL,
    TEXT,
    bare,
    box,
    new_figure,
    title,
    write,
)
from tutorials.simulation.talks import TURNS, num_computed, talks

RESULTS = HERE.parent / "results" / "replicas.json"
USERS = "ABC"

# --- nine turns ---


def by_arrival(router_cls: type[Router]) -> list[tuple[str, Served]]:
    """Each turn with its name, in the order in which they came."""
    config = Config(model="qwen3-8b", num_blocks=4000)
    run = simulate(talks(USERS), config, replicas=2, router_cls=router_cls)
    names = [f"{user}{turn + 1}" for user in USERS for turn in range(TURNS)]
    return sorted(zip(names, run.requests), key=lambda named: named[1].arrival)


def draw_turns() -> Figure:
    figure = new_figure(8.5, 3.6)
    routers = {"by turns": RoundRobin, "by prefix": PrefixAffinity}
    least = [num_computed(turn) for _, turn in by_arrival(PrefixAffinity)]
    for axes, (name, router_cls) in zip(figure.subplots(1, 2, sharey=True), routers.items()):
        turns = by_arrival(router_cls)
        for i, (turn_name, turn) in enumerate(turns):
            draw_turn(axes, i, turn, least[i])
            write(axes, i + 0.4, -110, turn_name, ha="center")
            write(axes, i + 0.4, -260, turn.replica, ha="center")
        num_tokens = sum(num_computed(turn) for _, turn in turns)
        title(axes, f"{name}: {num_tokens:,} tokens computed")
        axes.set_xlim(-0.1, len(turns))
        axes.set_ylim(-330, 1850)
        bare(axes, ["left"])
        axes.set_yticks([0, 500, 1000, 1500])
    first, _ = figure.axes
    first.set_ylabel("tokens of the prompt", fontsize=TEXT)
    write(first, -0.25, -260, "replica", ha="right", clip_on=False)
    return figure


def draw_turn(axes: Axes, place: int, turn: Served, num_new: int) -> None:
    """From below: what is in the cache, what is computed though another cache has it, what is new."""
    num_again = num_computed(turn) - num_new
    parts = [
        ("found", turn.num_cached_tokens, SKY),
        ("again", num_again, WASTE),
        ("new", num_new, ORANGE),
    ]
    base = 0
    for name, num_tokens, fill in parts:
        box(axes, place, base, 0.8, num_tokens, fill)
        if num_tokens:
            write(axes, place + 0.4, base + num_tokens / 2, name, fill, ha="center", fontsize=SMALL)
        base += num_tokens


# --- how far ahead ---

NO_BOUND = 10**9
LINES = {"conversations": ("0.1", "o-"), "documents": ("0.6", "s--")}


def draw_bounds() -> Figure:
    bounds = json.loads(RESULTS.read_bytes())["bounds"]
    figure = new_figure(8.5, 3.4)
    hits, times = figure.subplots(1, 2)
    for load, (color, style) in LINES.items():
        ones = {int(name.split()[1]): one for name, one in bounds.items() if name.startswith(load)}
        x = range(len(ones))
        ticks = ["no\nbound" if most == NO_BOUND else str(most) for most in ones]
        found = [100 * one["hit_rate"] for one in ones.values()]
        late = [one["ttft_ms"]["p50"] for one in ones.values()]
        for axes, values in ((hits, found), (times, late)):
            axes.plot(x, values, style, color=color, label=load)
            axes.set_xticks(x, ticks)
    title(hits, "prompt tokens found in a cache (%)")
    hits.set_ylim(0, 105)
    write(hits, 3.0, 99.5, "documents", ha="center", color="0.35")
    write(hits, 3.0, 79, "conversations", ha="center")
    title(times, "half of the first tokens come within (ms)")
    times.set_yscale("log")
    write(times, 5.9, 8.3, "documents", ha="right", color="0.35")
    write(times, 5.35, 300, "conversations", ha="right")
    times.set_ylim(6, 20_000)
    times.set_yticks([10, 100, 1000, 10_000], ["10", "100", "1,000", "10,000"])
    for axes in (hits, times):
        axes.set_xlabel("most_ahead", fontsize=TEXT)
        bare(axes, ["left", "bottom"])
    return figure


FIGURES = {"replicas_turns": draw_turns, "replicas_bounds": draw_bounds}
