"""Jobs: the requests of a simulation's clients, and their results. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush
from itertools import chain
from math import fsum, inf
from typing import Any, NamedTuple

from nanovllm.options import is_int, is_number, shown

STOP = 0  # the token that ends each answer
NO_ARGS: dict[str, Any] = {}

Runs = tuple[tuple[int, int], ...]  # (token id, how many of it), ...


class Job(NamedTuple):
    """A request as its client knows it. The scheduler sees the prompt, `max_tokens` and
    `extra_args`, when it arrives.

    A prompt is given in runs of equal tokens. What matters is only which prompts begin alike:
    ((7, 500), (8, 20)) and ((7, 500), (9, 30)) share 500 tokens. Token ids are above 0 (`STOP`).
    """

    time: float  # seconds: when it arrives; with `after`, how long after the end of that job
    prompt: Runs
    num_outputs: int  # tokens until the answer ends, the last one included, which is STOP
    answer: int = 1  # the token id of all others
    max_tokens: int = 2048  # what the client allows; the cache must have room for them
    extra_args: dict[str, Any] = NO_ARGS
    after: int | None = None  # index of the job that this one follows, in a conversation
    # before each output token, how many draft tokens would be right; -1 if none is proposed
    right_draft_tokens: Sequence[int] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(chain.from_iterable([token] * count for token, count in self.prompt))

    @property
    def conversation(self) -> Runs:
        """The prompt and the answer: the start of the next turn's prompt."""
        return (*self.prompt, (self.answer, self.num_outputs - 1), (STOP, 1))


@dataclass
class Served:
    """The result of a job. Times are in seconds since the start of the run."""

    job: Job
    arrival: float = inf  # while it has not arrived
    # when each output token came
    token_times: array[float] = field(default_factory=lambda: array("d"))
    num_cached_tokens: int = 0  # of its prompt, when it was first admitted
    num_preemptions: int = 0
    replica: int = 0  # the index of the one that has served it


class PlannedStep(NamedTuple):
    """One step of a run, for pictures."""

    start: float
    end: float
    # (index of the job, tokens computed, whether they belong to a prompt)
    items: list[tuple[int, int, bool]]
    running: list[int]  # indices of all that run, also of those without a part in this step


# what a scheduler counts
COUNTS = (
    *("num_prompt_tokens", "num_cached_tokens", "num_host_cached_tokens"),
    *("num_preemptions", "num_swapped_blocks"),
)
SUMS = ("num_steps", "num_computed_tokens", *COUNTS)


@dataclass
class Run:
    """The measurements of a simulation."""

    requests: list[Served]  # in the order of the jobs
    seconds: float = 0.0  # when the last step ended
    busy_seconds: float = 0.0  # the sum of all steps
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0  # of them, those that only the host had
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    kv_use: float = 0.0  # mean part of the KV blocks in use in a step, weighted by its seconds
    steps: list[PlannedStep] = field(default_factory=list)  # empty unless they were asked for
    replicas: list[Run] = field(default_factory=list)  # of each, if there are several


def total_of(runs: list[Run]) -> Run:
    """The sum of the runs of replicas that have served the same jobs. Each keeps its own steps."""
    total = Run(runs[0].requests, replicas=runs)
    for name in SUMS:
        setattr(total, name, sum(getattr(run, name) for run in runs))
    total.seconds = max(run.seconds for run in runs)
    # Python's own sum of floats is another one since 3.12
    total.busy_seconds = fsum(run.busy_seconds for run in runs)
    used = fsum(run.kv_use * run.busy_seconds for run in runs)
    total.kv_use = used / (total.busy_seconds or 1)
    return total


def check_job(index: int, job: Job, max_model_len: int) -> None:
    """Raises ValueError for a job that could not get all its tokens."""
    room = min(job.max_tokens, max_model_len - job.num_prompt_tokens)
    outputs = f"from 1 to {room}, by max_tokens and {max_model_len=}"
    is_earlier = job.after is None or is_int(job.after, 0, index - 1)
    for name, is_allowed, allowed in (
        ("time", is_number(job.time, 0), "a number of seconds, 0 or more"),
        ("prompt", job.num_prompt_tokens > 0, "at least one token"),
        ("num_outputs", is_int(job.num_outputs, 1, room), outputs),
        ("after", is_earlier, "None or the index of an earlier job"),
    ):
        if not is_allowed:
            value = shown(getattr(job, name))
            raise ValueError(f"job {index}: {name}={value} is not allowed: it must be {allowed}")


class Arrivals:
    """The order in which jobs arrive. A job that follows another one arrives some time after the
    end of that job."""

    def __init__(self, jobs: Sequence[Job]):
        self.jobs = jobs
        self.coming = [(job.time, i) for i, job in enumerate(jobs) if job.after is None]  # a heap
        heapify(self.coming)
        self.followers: dict[int, list[int]] = {}
        for i, job in enumerate(jobs):
            if job.after is not None:
                self.followers.setdefault(job.after, []).append(i)

    def follow(self, index: int, now: float) -> list[int]:
        """A job has ended: its followers, which come later."""
        followers = self.followers.get(index, [])
        for follower in followers:
            heappush(self.coming, (now + self.jobs[follower].time, follower))
        return followers
