"""Draws the replicas of chapter 19: what splitting a model wins and costs, what routers find, and how
far a router should follow a prefix.

    python -m tutorials.figures replicas_ranks replicas_routers replicas_bounds

Reads tutorials/results/replicas.json. Needs matplotlib.
"""

import json

from matplotlib.figure import Figure

from tutorials.figures.style import HERE, new_figure

RESULTS = HERE.parent / "results" / "replicas.json"
# of Okabe and Ito's colors, which the color-blind can tell apart
ROUTERS = {"round robin": "#999999", "least loaded": "#E69F00", "prefix affinity": "#0072B2"}
LINKS = {
    "nvlink": ("NVLink", "#0072B2"),
    "pcie": ("PCIe", "#E69F00"),
    "network": ("network", "#009E73"),
}
LOADS = {"conversations": "#0072B2", "documents": "#D55E00"}
NO_BOUND = 10**9


def draw_ranks(ranks: dict) -> Figure:
    """A line for each link: what a user waits for a token, and what a device is used for."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for link, (label, color) in LINKS.items():
        points = {1: ranks["1 nvlink"]}  # which needs no link
        points |= {int(name.split()[0]): one for name, one in ranks.items() if name.endswith(link)}
        x = [one["tpot_ms"] for one in points.values()]
        y = [one["per_device"] for one in points.values()]
        axes.plot(x, y, "o-", color=color, label=label)
        for num_ranks, place in zip(points, zip(x, y)):
            axes.annotate(str(num_ranks), place, (-3, 7), textcoords="offset points", color=color)
    axes.set_xlim(0)
    axes.set_ylim(0, 1.1 * max(one["per_device"] for one in ranks.values()))
    axes.set_xlabel("ms per token, for a user who is alone")
    axes.set_ylabel("tokens/s of each H100, with many users")
    axes.set_title("Qwen3-32B, simulated; the number is that of the H100s", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(title="between them", frameon=False)
    return figure


def draw_routers(routers: dict) -> Figure:
    loads = list(dict.fromkeys(name.partition(", ")[0] for name in routers))
    figure = new_figure(9, 3.6)
    hits, times = figure.subplots(1, 2)
    for i, (router, color) in enumerate(ROUTERS.items()):
        ones = [routers[f"{load}, {router}"] for load in loads]
        x = [place + 0.27 * (i - 1) for place in range(len(loads))]
        hits.bar(x, [100 * one["hit_rate"] for one in ones], 0.25, color=color, label=router)
        times.bar(x, [one["ttft_ms"]["p50"] for one in ones], 0.25, color=color)
        tails = [one["ttft_ms"]["p99"] for one in ones]
        times.plot(x, tails, "_", color=color, markersize=14, markeredgewidth=3)
    hits.set_ylabel("% of prompt tokens found in a cache")
    times.set_ylabel("ms to the first token")
    times.set_title("bar: half of all; dash: 99 in 100", fontsize="small")
    for axes in (hits, times):
        axes.set_xticks(range(len(loads)), loads)
        axes.grid(axis="y", alpha=0.3)
    figure.legend(
        *hits.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    return figure


def draw_bounds(bounds: dict) -> Figure:
    figure = new_figure(9, 3.6)
    hits, times = figure.subplots(1, 2)
    for load, color in LOADS.items():
        ones = {int(name.split()[1]): one for name, one in bounds.items() if name.startswith(load)}
        x = range(len(ones))
        hits.plot(
            x, [100 * one["hit_rate"] for one in ones.values()], "o-", color=color, label=load
        )
        for q, style in (("p50", "o-"), ("p99", "x--")):
            label = f"{load}, {'half of all' if q == 'p50' else '99 in 100'}"
            times.plot(
                x, [one["ttft_ms"][q] for one in ones.values()], style, color=color, label=label
            )
        for axes in (hits, times):
            axes.set_xticks(x, ["none" if most == NO_BOUND else str(most) for most in ones])
    hits.set_ylabel("% of prompt tokens found in a cache")
    hits.set_ylim(0, 100)
    times.set_ylabel("ms to the first token")
    times.set_yscale("log")
    for axes in (hits, times):
        axes.set_xlabel("most_ahead")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def report(part: str) -> dict:
    return json.loads(RESULTS.read_bytes())[part]


FIGURES = {
    "replicas_ranks": lambda: draw_ranks(report("ranks")),
    "replicas_routers": lambda: draw_routers(report("routers")),
    "replicas_bounds": lambda: draw_bounds(report("bounds")),
}
