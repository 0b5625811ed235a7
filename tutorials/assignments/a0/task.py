"""Assignment 0: find the bug. What is served, and what is measured."""

from collections.abc import Iterable
from math import inf
from statistics import mean

from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.simulator import Job, Run
from tutorials.assignments.a0.questions import QUESTIONS
from tutorials.assignments.task import Goal, Part, Task, serve
from tutorials.simulation.metrics import ttft
from tutorials.simulation.workloads import all_at_once, lognormal, poisson, shared_prefix, workload

MOST_TOKENS = 384  # of a step, in C
MOST_PROMPT_TOKENS = 256


# --- loads ---


def little_memory(seed: int) -> list[Job]:
    """Long answers, so that memory runs out."""
    lengths = lognormal(100, 150, sigma=0.7, max_model_len=1024, seed=seed)
    return workload(poisson(rate=20, seed=seed), lengths, count=150)


def documents(seed: int) -> list[Job]:
    """Questions about eight documents of 512 tokens, which they share."""
    lengths = lognormal(40, 60, sigma=0.5, seed=seed)
    return shared_prefix(
        poisson(rate=15, seed=seed), lengths, count=120, prefix_tokens=512, seed=seed
    )


def many_at_once(seed: int) -> list[Job]:
    return workload(all_at_once(), lognormal(80, 60, sigma=0.5, seed=seed), count=250)


# --- A ---


def ttft_share(run: Run, baseline: Run) -> float:
    return mean(map(ttft, run.requests)) / mean(map(ttft, baseline.requests))


def admissions(run: Run) -> list[tuple[int, float]]:
    """Of each admission: the step, and the step at which the request was preempted before. That is
    infinity for a newcomer."""
    found: list[tuple[int, float]] = []
    left: dict[int, int] = {}
    before: set[int] = set()
    for i, step in enumerate(run.steps):
        running = set(step.running)
        left.update((request, i) for request in before - running)
        found += [(i, left.get(request, inf)) for request in running - before]
        before = running
    return found


def in_turn(run: Run, baseline: Run) -> float:
    """How many of those who came back had been overtaken by nobody: no newcomer, and none who was
    preempted later. Counts only if short prompts are first: in FCFS order it is no art."""
    if ttft_share(run, baseline) > 0.97:
        return 0.0
    admitted = admissions(run)
    were_overtaken = [
        any(preempted < step < back and later > preempted for step, later in admitted)
        for back, preempted in admitted
        if preempted < inf
    ]
    return 1 - mean(were_overtaken or [1])


# --- B ---


class Counting(BlockManager):
    """Counts from the other end what B must count: what was taken, and is not in use any more, has
    become free."""

    num_taken = 0

    @property
    def num_freed(self) -> int:
        return self.num_taken - self.num_used_blocks

    def take_prefix(self, seq) -> None:
        num_used = self.num_used_blocks
        super().take_prefix(seq)
        self.num_taken += self.num_used_blocks - num_used

    def take_block(self):
        self.num_taken += 1
        return super().take_block()


def counts(part: Part, module, manager_cls: type[BlockManager], seed: int) -> list:
    """What a block manager has counted, after each step was planned."""
    found = []

    def take_moves(self):
        found.append([getattr(self, name, "missing") for name in part.counts])
        return manager_cls.take_moves(self)

    watched = type(manager_cls.__name__, (manager_cls,), {"take_moves": take_moves})
    serve(part, getattr(module, part.scheduler), seed, watched, check=False)
    return found


def hits_share(run: Run, baseline: Run) -> float:
    return run.num_cached_tokens / baseline.num_cached_tokens


# --- C ---


def prompt_tokens(items: Iterable[tuple[int, int, bool]]) -> int:
    return sum(num_tokens for _, num_tokens, is_prompt in items if is_prompt)


def most_prompt_tokens(run: Run, baseline: Run) -> float:
    return max(prompt_tokens(step.items) for step in run.steps)


def room_used(run: Run, baseline: Run) -> float:
    """Prompt tokens, divided by those that had room in a step, beside a token for everybody else
    who runs, until the last prompt was computed. Counts only if no step has many more than it
    may."""
    if most_prompt_tokens(run, baseline) > 300:
        return 0.0
    of_steps = [prompt_tokens(step.items) for step in run.steps]
    last = max(i for i, num_tokens in enumerate(of_steps) if num_tokens)
    used = room = 0
    for step, num_tokens in zip(run.steps[:last], of_steps):  # the last one has only a rest
        others = sum(count for _, count, _ in step.items) - num_tokens
        used += num_tokens
        room += min(MOST_PROMPT_TOKENS, MOST_TOKENS - others)
    return used / room


TASK = Task(
    "Find the bug: three invariants",
    [
        Part(
            "A",
            little_memory,
            Config(
                model="qwen3-8b",
                num_blocks=150,
                max_num_seqs=64,
                max_num_batched_tokens=512,
                max_model_len=1024,
            ),
            [
                Goal(
                    "mean time to first token / that of FCFS",
                    ttft_share,
                    none=1.0,
                    full=0.95,
                    points=10,
                ),
                Goal(
                    "preempted ones whom nobody overtook",
                    in_turn,
                    none=0.6,
                    full=0.95,
                    points=12,
                ),
            ],
            points=3,
            scheduler="SchedulerA",
            keep_steps=True,
        ),
        Part(
            "B",
            documents,
            Config(
                model="qwen3-8b",
                num_blocks=600,
                max_num_seqs=64,
                max_num_batched_tokens=512,
                max_model_len=2048,
            ),
            [
                Goal(
                    "tokens from the cache / those of the base class",
                    hits_share,
                    none=0.5,
                    full=0.8,
                    points=8,
                )
            ],
            points=14,
            scheduler="Scheduler",
            block_manager="BlockManagerB",
            counting=Counting,
            counts=("num_freed",),
        ),
        Part(
            "C",
            many_at_once,
            Config(
                model="qwen3-8b",
                num_blocks=3000,
                max_num_seqs=250,
                max_num_batched_tokens=MOST_TOKENS,
                max_model_len=2048,
            ),
            [
                Goal(
                    "most prompt tokens of a step",
                    most_prompt_tokens,
                    none=MOST_TOKENS,
                    full=MOST_PROMPT_TOKENS,
                    points=8,
                ),
                Goal(
                    "prompt tokens / those that had room",
                    room_used,
                    none=0.5,
                    full=0.95,
                    points=12,
                ),
            ],
            points=3,
            scheduler="SchedulerC",
            keep_steps=True,
        ),
    ],
    engine_points=0,
    questions=dict(QUESTIONS),
    question_points=10,
)
