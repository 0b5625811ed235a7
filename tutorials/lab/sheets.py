"""Sheets: controls instead of an editor, and a question. Each is a simulation beside one with the values
at the start. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from nanovllm import Job, Run, simulate
from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from tutorials.lab.film import NUM_FRAMES, Film, filmed
from tutorials.lab.runs import time_lines
from tutorials.simulation.metrics import ROWS, cells, latency, summary, ttft
from tutorials.simulation.policies import LastFirst
from tutorials.simulation.workloads import lognormal, poisson, predicted, workload

BEFORE, NOW = "at the start", "as you set it"
CHOSEN = (  # of the table of metrics
    "TTFT, p50 (s)",
    "TTFT, p99 (s)",
    "between tokens, p99 (s)",
    "end to end, p99 (s)",
    "output tokens/s",
    "KV blocks in use",
    "preemptions",
)


class Control(NamedTuple):
    """One slider: it goes through the values."""

    name: str
    label: str
    values: tuple
    start: Any
    needs: tuple[str, Any] | None = None  # another one's value, without which it does nothing


class Load(NamedTuple):
    """What a setting of the controls comes to."""

    jobs: list[Job]
    config: Config
    scheduler_cls: type[Scheduler] = Scheduler


@dataclass
class Sheet:
    title: str
    question: str
    try_this: str
    controls: tuple[Control, ...]
    load: Callable[..., Load]  # of a value for each control
    rows: Callable[[Run, Film], dict[str, str]]  # more of the table

    def described(self) -> dict[str, Any]:
        controls = [control._asdict() for control in self.controls]
        texts = {"title": self.title, "question": self.question, "try_this": self.try_this}
        return texts | {"controls": controls}

    def results(self, values: dict[str, Any]) -> dict[str, Any]:
        """Raises ValueError for a value that no control has."""
        starts = {control.name: control.start for control in self.controls}
        chosen = starts | values
        for control in self.controls:
            if chosen[control.name] not in control.values:
                raise ValueError(
                    f"{control.name}={chosen[control.name]!r} is not one of its values"
                )
        played = {name: self.play(setting) for name, setting in ((BEFORE, starts), (NOW, chosen))}
        chosen_rows = [row for row in ROWS if row[0] in CHOSEN]
        table = cells({name: summary(run) for name, (run, _) in played.items()}, chosen_rows)
        more = [self.rows(*one) for one in played.values()]
        table += [[name, *(one[name] for one in more)] for name in more[0]]
        _, film = played[NOW]
        return {
            "table": table,
            "goals": [],
            "film": film.run(self.title),
            **time_lines({name: run for name, (run, _) in played.items()}),
        }

    def play(self, values: dict[str, Any]) -> tuple[Run, Film]:
        jobs, config, scheduler_cls = self.load(**values)
        film = Waste(20 * len(jobs) // NUM_FRAMES)
        seen = filmed(scheduler_cls, film)
        return simulate(jobs, config, scheduler_cls=seen, keep_steps=True), film


class Waste(Film):
    """Also measures which part of the blocks in use holds nothing, in the mean of all steps."""

    def __init__(self, steps_per_frame: int):
        super().__init__(steps_per_frame)
        self.used = self.filled = self.running = 0

    def after_step(self, schedule) -> None:
        super().after_step(schedule)
        manager = self.scheduler.block_manager
        self.used += schedule.num_used_blocks * manager.block_size
        self.filled += sum(start + count for _, start, count in schedule.items)
        self.running += len(schedule.items)


# --- the three ---


def budget(tokens: int, blocks: int, rate: float) -> Load:
    lengths = lognormal(prompt=300, output=60, sigma=1.0, seed=1)
    config = Config(
        model="qwen3-8b",
        num_blocks=blocks,
        max_num_seqs=64,
        max_num_batched_tokens=tokens,
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    return Load(workload(poisson(rate, seed=1), lengths, 200), config)


def longest_step(run: Run, film: Film) -> dict[str, str]:
    seconds = max(step.end - step.start for step in run.steps)
    return {"longest step (s)": f"{seconds:.4f}", "steps": f"{run.num_steps:,}"}


class ByGuess(Scheduler):
    """Shortest guess first; each second of waiting counts as much as `ageing` tokens."""

    ageing = 0

    def priority(self, request):
        waited = self.clock() - request.arrival_time
        return request.params.extra_args["predicted_tokens"] - self.ageing * waited, request.arrival


class LongestGuess(Scheduler):
    def priority(self, request):
        return -request.params.extra_args["predicted_tokens"], request.arrival


ORDERS = {
    "first come": Scheduler,
    "last come": LastFirst,
    "shortest guess": ByGuess,
    "longest guess": LongestGuess,
}


def order(first: str, ageing: int) -> Load:
    lengths = lognormal(prompt=100, output=100, sigma=1.0, seed=2)
    jobs = predicted(workload(poisson(rate=24, seed=2), lengths, 250), sigma=0.5, seed=2)
    config = Config(
        model="qwen3-8b",
        num_blocks=1000,
        max_num_seqs=12,
        max_num_batched_tokens=512,
        max_model_len=2048,
    )
    scheduler_cls = ORDERS[first]
    if scheduler_cls is ByGuess:
        scheduler_cls = type("ByGuess", (ByGuess,), {"ageing": ageing})
    return Load(jobs, config, scheduler_cls)


def waits(run: Run, film: Film) -> dict[str, str]:
    return {
        "mean latency (s)": f"{mean(map(latency, run.requests)):.3f}",
        "mean TTFT (s)": f"{mean(map(ttft, run.requests)):.3f}",
        "longest TTFT (s)": f"{max(map(ttft, run.requests)):.3f}",
    }


AGEING = "tokens that a second of waiting is worth (for the shortest guess)"
MEMORY = 16_384  # tokens that the cache has room for, whatever a block's size


def blocks(size: int, length: int) -> Load:
    lengths = lognormal(prompt=length, output=length, sigma=0.8, seed=3)
    config = Config(
        model="qwen3-8b",
        block_size=size,
        num_blocks=MEMORY // size,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    return Load(workload(poisson(rate=40, seed=3), lengths, 150), config)


def waste(run: Run, film: Waste) -> dict[str, str]:
    return {
        "of the blocks in use, empty": f"{1 - film.filled / film.used:.1%}",
        "requests in a step, mean": f"{film.running / run.num_steps:.1f}",
        "all answered after (s)": f"{run.seconds:.2f}",
    }


SHEETS = {
    "budget": Sheet(
        "Tokens per step, blocks, and the rate of requests",
        "A larger budget of tokens computes prompts sooner. Who pays for it?",
        "Set the budget to 2,048 tokens, and look at the time between tokens. Then find the rate at "
        "which first tokens come late, and the number of blocks at which requests are preempted.",
        (
            Control("tokens", "tokens in a step, at most", (64, 128, 256, 512, 1024, 2048), 256),
            Control("blocks", "KV blocks", (160, 200, 300, 500, 1000, 2000), 1000),
            Control("rate", "requests per second", (5, 15, 30, 60, 90, 120, 150), 15),
        ),
        budget,
        longest_step,
    ),
    "order": Sheet(
        "The order of the queue",
        "Shortest first has the smallest mean latency. Who pays for it, and how much does ageing help?",
        "Choose the shortest guess first without ageing, and look at the mean latency and at the "
        "longest TTFT (time to first token). Then raise the ageing step by step.",
        (
            Control("first", "who is first", tuple(ORDERS), "first come"),
            Control(
                "ageing", AGEING, (0, 10, 25, 50, 100, 200, 400), 0, ("first", "shortest guess")
            ),
        ),
        order,
        waits,
    ),
    "blocks": Sheet(
        "The size of a block, and what is wasted",
        "The memory is the same, 16,384 tokens. How large may a block be until its empty rest costs "
        "seats?",
        "Go from 16 tokens to 2,048: then a block is as large as the longest request may be, and "
        "each request reserves all of it, as before PagedAttention. The simulator does not know "
        "that very small blocks make attention slower.",
        (
            Control("size", "tokens in a block", (1, 4, 16, 64, 128, 256, 512, 1024, 2048), 16),
            Control("length", "tokens in a prompt and in an answer, mean", (50, 100, 200), 100),
        ),
        blocks,
        waste,
    ),
}
