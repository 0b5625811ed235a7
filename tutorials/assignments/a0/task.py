"""Assignment 0: find the bug. What is served, and what is measured."""

from collections.abc import Iterable
from math import inf
from statistics import mean
from typing import NamedTuple

from nanovllm import Job, Run
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.options import shown
from nanovllm.scheduler import Scheduler
from tutorials.assignments.a0.questions import QUESTIONS
from tutorials.assignments.task import Goal, Part, Task, serve
from tutorials.simulation.workloads import all_at_once, lognormal, poisson, shared_prefix, workload

MOST_TOKENS = 384  # of a step, in C
MOST_PROMPT_TOKENS = 256
LEAST_SHARE = 0.6  # of A's requests that were not overtaken: what earns nothing
LEAST_USED = 0.5  # of C's room: what earns nothing


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


class Admission(NamedTuple):
    request: int
    step: int
    preempted: float  # in which step it was, before; infinity for a newcomer


def admissions(run: Run) -> list[Admission]:
    found: list[Admission] = []
    left: dict[int, int] = {}
    before: set[int] = set()
    for i, step in enumerate(run.steps):
        running = set(step.running)
        left.update((request, i) for request in before - running)
        found += [Admission(request, i, left.get(request, inf)) for request in running - before]
        before = running
    return found


def share_short_first(run: Run) -> float:
    """How many of the newcomers had been overtaken by no newcomer with a longer prompt."""
    newcomers = [
        (run.requests[admission.request], admission.step)
        for admission in admissions(run)
        if admission.preempted == inf
    ]
    starts = [step.start for step in run.steps]
    were_overtaken = [
        any(
            served.arrival <= starts[other] and other < step
            for longer, other in newcomers
            if longer.job.num_prompt_tokens > served.job.num_prompt_tokens
        )
        for served, step in newcomers
    ]
    return 1 - mean(were_overtaken)


def share_in_turn(run: Run) -> float:
    """How many of those who came back had been overtaken by nobody: no newcomer, and none who was
    preempted later."""
    admitted = admissions(run)
    were_overtaken = [
        any(preempted < other < step and later > preempted for _, other, later in admitted)
        for _, step, preempted in admitted
        if preempted < inf
    ]
    return 1 - mean(were_overtaken or [1])


def short_first(run: Run, baseline: Run) -> float:
    """Counts only if preempted ones come back in turn: the order alone is there from the start."""
    share = share_short_first(run)
    return share if share_in_turn(run) > LEAST_SHARE else min(share, LEAST_SHARE)


def in_turn(run: Run, baseline: Run) -> float:
    """Counts only if short prompts are first: in FCFS order it is no art."""
    return share_in_turn(run) if share_short_first(run) >= 0.9 else 0.0


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


def counts(part: Part, manager_cls: type[BlockManager], seed: int) -> list:
    """What a block manager has counted, after each step was planned."""
    found: list = []

    def take_moves(self):
        found.append(getattr(self, "num_freed", None))
        return manager_cls.take_moves(self)

    watched = type(manager_cls.__name__, (manager_cls,), {"take_moves": take_moves})
    serve(part, Scheduler, seed, watched, check=False)
    return found


def check_counts(part: Part, manager_cls: type[BlockManager], seed: int) -> None:
    """Raises AssertionError unless it counts in each step what `Counting` counts."""
    steps = zip(counts(part, manager_cls, seed), counts(part, Counting, seed))
    for i, (value, right) in enumerate(steps, start=1):
        wrong = f"{manager_cls.__name__}.num_freed is {shown(value)}, not {right}"
        assert value == right, f"step {i}: {wrong}"


# --- C ---


def prompt_tokens(items: Iterable[tuple[int, int, bool]]) -> int:
    return sum(num_tokens for _, num_tokens, is_prompt in items if is_prompt)


def prompt_tokens_of_fullest(run: Run) -> int:
    return max(prompt_tokens(step.items) for step in run.steps)


def share_of_room(run: Run) -> float:
    """Prompt tokens, divided by those that had room in a step, beside a token for everybody else
    who runs, until the last prompt was computed."""
    of_steps = [prompt_tokens(step.items) for step in run.steps]
    last = max(i for i, num_tokens in enumerate(of_steps) if num_tokens)
    used = room = 0
    for step, num_tokens in zip(run.steps[:last], of_steps):  # the last one has only a rest
        others = sum(count for _, count, _ in step.items) - num_tokens
        used += num_tokens
        room += min(MOST_PROMPT_TOKENS, MOST_TOKENS - others)
    return used / room


def most_prompt_tokens(run: Run, baseline: Run) -> float:
    """Counts only if the room is used: smaller steps alone are no art."""
    return prompt_tokens_of_fullest(run) if share_of_room(run) > LEAST_USED else MOST_TOKENS


def room_used(run: Run, baseline: Run) -> float:
    """Counts only if no step has many more than it may."""
    return share_of_room(run) if prompt_tokens_of_fullest(run) <= 300 else 0.0


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
                    "newcomers whom no longer prompt overtook",
                    short_first,
                    none=LEAST_SHARE,
                    full=0.95,
                    points=10,
                ),
                Goal(
                    "preempted ones whom nobody overtook",
                    in_turn,
                    none=LEAST_SHARE,
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
            [],  # a block manager that does not share has other counts than `Counting`
            points=22,
            scheduler="Scheduler",
            block_manager="BlockManagerB",
            check_manager=check_counts,
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
                    none=LEAST_USED,
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
