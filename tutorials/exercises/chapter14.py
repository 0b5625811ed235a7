"""Your answers to the exercises of chapter 14. To check them: python -m tutorials.check 14"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple, Protocol

from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


# --- 14.1 ---
def promised(requests: list[tuple[float, int, list[float]]], first: float, pause: float) -> float:
    """The share of requests that were served as promised, from 0 to 1.

    A request is (arrival, num_outputs, times of its tokens). Promised are all its tokens: the first
    at most `first` seconds after the arrival, and each other one at most `pause` seconds after the
    one before.
    """
    raise NotImplementedError


# --- 14.2 ---
class Job(NamedTuple):
    name: str
    time: float  # seconds: when it arrives; with `after`, how long after the end of that job
    num_prompt: int  # tokens
    num_outputs: int
    after: str | None = None  # the name of a job that stands before it in the list


def request_of(job: Job, arrival: int) -> Request:
    """`arrival` counts those that have come before."""
    prompt = [1000 + arrival] * job.num_prompt
    params = SamplingParams(max_tokens=job.num_outputs)
    return Request(job.name, None, prompt, params, arrival=arrival)


def serve(
    scheduler: Scheduler, jobs: list[Job], seconds: Callable[[Schedule], float]
) -> dict[str, list[float]]:
    """For each job, when its tokens came. `seconds` says what a step takes, and is asked once for
    each step. Several jobs may follow the same one. What comes at the same moment comes in the order
    of the list."""
    raise NotImplementedError


# --- 14.3 ---
class Machine(Protocol):
    def step(self, items: list[tuple[int, int]]) -> float:
        """Runs a step, and returns its seconds. An item is a sequence: tokens computed in the step,
        1 or more, and tokens in its context then, which are at least as many."""


def measured(machine: Machine) -> tuple[float, float, float, float]:
    """Seconds per step, per sequence, per token computed, and per token in a context.

    A step takes the sum of them. Of each three steps, two are disturbed, and take longer. Each
    number must be right to within 2 %, and `machine` makes at most 60 steps.
    """
    raise NotImplementedError
