"""Draws one small workload under several policies.

    python -m tutorials.figures policies

It is for chapter 16. Needs matplotlib, no torch.
"""

from dataclasses import replace

from matplotlib.figure import Figure

from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from nanovllm.simulator import Job, simulate
from nanovllm.simulator.cost_model import HARDWARE
from nanovllm.simulator.machines import Machine
from tutorials.figures.style import new_figure
from tutorials.simulation.plots import gantt

# --- the policies and the eight requests of chapter 16 ---


class ShortestFirst(Scheduler):
    def priority(self, request):
        return request.params.extra_args["predicted_tokens"], request.arrival


class ShortestDecodesFirst(ShortestFirst):
    def running_order(self, request):
        return request.is_prefilling, self.priority(request)


class PromptBound(Scheduler):
    def step_budget(self):
        return self.max_num_batched_tokens, 8


class PushesOut(Scheduler):
    def priority(self, request):
        return request.arrival_time + request.params.extra_args["deadline"]

    def make_room(self, schedule):
        if self.waiting and len(self.running) == self.max_num_seqs:
            urgent = min(self.waiting, key=self.priority)
            last = max(self.running, key=self.priority)
            if self.priority(urgent) < self.priority(last):
                self.preempt(last)


class OneSecond(Machine):
    def seconds(self, shape, items, **step):
        return 1.0


ROWS = (  # arrival, prompt tokens, output tokens, deadline
    (0, 12, 20, 60),
    (0, 16, 24, 60),
    (1, 8, 16, 60),
    (3, 80, 6, 60),
    (5, 12, 16, 60),
    (8, 8, 3, 10),
    (10, 10, 9, 60),
    (12, 6, 2, 6),
)
EIGHT = [
    Job(
        time,
        ((2 * i + 1, n_in),),
        n_out,
        2 * i + 2,
        24,
        {"deadline": deadline, "predicted_tokens": n_out},
    )
    for i, (time, n_in, n_out, deadline) in enumerate(ROWS)
]
SMALL = Config(
    model="qwen3-0.6b", num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
)
FEW_BLOCKS = replace(SMALL, num_blocks=38, enable_prefix_caching=False)
PANELS = (
    ("first come, first served", Scheduler, SMALL),
    ("shortest first", ShortestFirst, SMALL),
    ("shortest first, but decodes before prompts", ShortestDecodesFirst, SMALL),
    ("at most 8 tokens of prompts per step", PromptBound, SMALL),
    ("earliest deadline first, pushing out", PushesOut, SMALL),
    ("first come, first served, with 38 blocks", Scheduler, FEW_BLOCKS),
)


def draw_policies() -> Figure:
    figure = new_figure(13, 10)
    for axes, (title, scheduler_cls, config) in zip(figure.subplots(3, 2).flat, PANELS):
        run = simulate(EIGHT, config, OneSecond(HARDWARE["h100"]), scheduler_cls, keep_steps=True)
        gantt(run, axes, title=title)
        axes.set_xlim(0, 42)  # the same for all
    return figure


FIGURES = {"policies": draw_policies}
