"""Simulator: the real scheduler and block manager under a virtual clock. Imports no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STOP = 0  # the token that ends each answer
NO_ARGS: dict[str, Any] = {}

Runs = tuple[tuple[int, int], ...]  # (token id, how many of it), ...


class Job(NamedTuple):
    """A request as its client knows it. The scheduler sees the prompt, `max_tokens` and `extra_args`, when it arrives.

    A prompt is given in runs of equal tokens. What matters is only which prompts begin alike: ((7, 500), (8, 20)) and
    ((7, 500), (9, 30)) share 500 tokens. Token ids are above 0 (`STOP`).
    """

    time: float  # seconds: when it arrives; with `after`, how long after the end of that job
    prompt: Runs
    num_outputs: int  # tokens until the answer ends, the last one included, which is STOP
    answer: int = 1  # the token id of all others
    max_tokens: int = 2048
    extra_args: dict[str, Any] = NO_ARGS
    after: int | None = None  # index of the job that this one follows, as the next turn of a conversation

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    @property
    def conversation(self) -> Runs:
        """Its prompt and its answer: what the prompt of the next turn begins with."""
        return (*self.prompt, (self.answer, self.num_outputs - 1), (STOP, 1))


@dataclass
class Served:
    """What became of a job. Times are in seconds since the start of the run."""

    job: Job
    arrival: float = 0.0
    token_times: array[float] = field(default_factory=lambda: array("d"))  # when each output token came
    num_cached_tokens: int = 0  # of its prompt, when it was first admitted
    num_preemptions: int = 0


class PlannedStep(NamedTuple):
    """One step of a run, for pictures."""

    start: float
    end: float
    items: list[tuple[int, int, bool]]  # (index of the job, tokens computed, whether they belong to a prompt)


@dataclass
class Run:
    """What a simulation measured."""

    requests: list[Served]  # in the order of the jobs
    seconds: float = 0.0  # when the last step ended
    busy_seconds: float = 0.0  # the sum of all steps
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    kv_use: float = 0.0  # mean part of the KV blocks in use while steps ran, weighted by their seconds
    steps: list[PlannedStep] = field(default_factory=list)  # empty unless they were asked for
