"""Draws chapter 00: four requests in the engine, step by step, and what weights and cache take.

    python -m tutorials.figures overview_seats overview_memory

Needs matplotlib.
"""

from matplotlib.figure import Figure

from nanovllm import LLM, SamplingParams
from nanovllm.topics.simulator.cost_model import SHAPES, shape_of
from tutorials.figures.fills import BLUE, ORANGE
from tutorials.figures.style import TEXT, bare, box, new_figure, write
from tutorials.figures.timeline import HEIGHT, Cell, draw_timeline, fill_of
from tutorials.ladder.runs import four_requests

BUDGET = 24  # tokens per step
NAMES = ("sum", "sort", "book", "late")
TOKENS = 1000  # of a request
REQUESTS = (1, 11, 16, 64)
MB = 10**6


def nine_steps() -> list[dict[str, int]]:
    """Tokens computed in each step: three requests at once, the fourth after three steps."""
    llm = LLM(dtype="float32", device="cpu", num_blocks=64, max_num_batched_tokens=BUDGET)
    requests = dict(zip(NAMES, four_requests(llm)))
    steps: list[dict[str, int]] = []

    def watch(schedule, seconds: float) -> None:
        steps.append({seq.request.request_id: n for seq, _, n in schedule.items})

    llm.observers.append(watch)
    while requests or llm.has_unfinished():
        for name in [*requests][:-1] if len(steps) < 3 else [*requests]:
            request = requests.pop(name)
            params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            llm.add_request(request.prompt, params, request_id=name)
        llm.step()
    return steps


def draw_seats() -> Figure:
    steps = nine_steps()
    cells = [
        Cell(NAMES.index(name), i, "", fill_of(NAMES.index(name)), n)
        for i, step in enumerate(steps)
        for name, n in step.items()
    ]
    figure = new_figure(8.5, 2.5)
    axes = figure.subplots()
    draw_timeline(axes, cells, [*NAMES], len(steps))
    labels = [f"step {i}\n{sum(step.values())} tokens" for i, step in enumerate(steps, 1)]
    axes.set_xticks(axes.get_xticks(), labels)
    write(axes, 0.5, HEIGHT / 2 - 2, "waits", ha="center")
    write(axes, 1.5, HEIGHT / 2 - 3, "not yet here", ha="center")
    write(axes, 6.15, HEIGHT / 2 - 2, "its prompt of 47 took three steps")
    return figure


def draw_memory() -> Figure:
    """Weights and cache in one bar for each number of requests."""
    shape = shape_of(SHAPES["qwen3-0.6b"], itemsize=2)
    weights = shape.weight_bytes / MB
    figure = new_figure(8.5, 2.6)
    axes = figure.subplots()
    for row, count in enumerate(REQUESTS):
        cache = count * TOKENS * shape.kv_bytes / MB
        label = f"cache {cache:,.0f}"
        write(axes, -60, -row, f"{count} request{'s' * (count > 1)}", ha="right")
        box(axes, 0, -row - 0.3, weights, 0.6, BLUE, f"weights {weights:,.0f}")
        box(axes, weights, -row - 0.3, cache, 0.6, ORANGE, label if count > 1 else "")
        if count == 1:
            write(axes, weights + cache + 60, -row, label)
        if count - 1 < weights * MB / (TOKENS * shape.kv_bytes) <= count:
            write(axes, weights + cache + 60, -row, "more cache than weights")
    axes.set_xlim(0, 8600)
    axes.set_ylim(0.5 - len(REQUESTS), 0.4)
    bare(axes, ["bottom"])
    ticks = range(0, 8001, 2000)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("MB, for Qwen3-0.6B in bfloat16 and requests of 1,000 tokens", fontsize=TEXT)
    return figure


FIGURES = {"overview_seats": draw_seats, "overview_memory": draw_memory}
