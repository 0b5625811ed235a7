"""Draws four steps of chapter 11's simulated device, without overlap and with it.

    python -m tutorials.figures overlap_steps

The times are those of a run of the engine. Needs matplotlib.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm import LLM, SamplingParams
from tutorials.figures.fills import BLUE, SKY, WASTE
from tutorials.figures.style import SMALL, bare, box, new_figure, title, write

NUM_STEPS = 4


class Span(NamedTuple):
    begin: int
    end: int


class Device:
    """As in the chapter; it notes when host and device work."""

    num_blocks, num_host_blocks = 64, 0
    host = free_at = 0

    def __init__(self):
        self.of_host: list[Span] = []
        self.of_device: list[Span] = []

    def launch(self, schedule):
        begin = self.host
        self.host += 3
        self.of_host.append(Span(begin, self.host))
        begin = max(self.host, self.free_at)
        self.free_at = end = begin + 8
        self.of_device.append(Span(begin, end))
        tokens = [5] * len(schedule.sampled)

        def collect():
            self.host = max(self.host, end)
            return tokens, None

        return collect


def run(overlap: bool) -> Device:
    device = Device()
    llm = LLM(runner=device, overlap=overlap)
    params = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5, 6]], params, use_tqdm=False)
    return device


def draw(axes: Axes, device: Device) -> int:
    """Returns for how long the device waits, in ms."""
    idle = last = 0
    for i, (host, busy) in enumerate(zip(device.of_host, device.of_device), 1):
        box(axes, host.begin, 1, host.end - host.begin, 0.7, SKY, i)
        if busy.begin > last:
            box(axes, last, 0, busy.begin - last, 0.7, WASTE, "waits")
        box(axes, busy.begin, 0, busy.end - busy.begin, 0.7, BLUE, f"step {i}: 8 ms")
        idle += busy.begin - last
        last = busy.end
        axes.annotate("", (busy.begin, 0.7), (host.end, 1), arrowprops={"arrowstyle": "->", "shrinkB": 0})
    for y, name in ((1.35, "host"), (0.35, "device")):
        write(axes, -0.5, y, name, ha="right")
    write(axes, last + 0.4, 0.35, f"{last} ms", fontsize=SMALL)
    axes.set_xlim(-4, 49)
    axes.set_ylim(-0.1, 1.8)
    bare(axes)
    return idle


def draw_steps() -> Figure:
    figure = new_figure(8.5, 3.2)
    above, below = figure.subplots(2, 1)
    idle = draw(above, run(overlap=False))
    title(above, f"one after the other: the host plans and launches a step in 3 ms, and the device waits {idle} ms in all")
    idle = draw(below, run(overlap=True))
    title(below, f"with overlap: step 2 is launched while step 1 is computed; the device waits {idle} ms")
    return figure


FIGURES = {"overlap_steps": draw_steps}
