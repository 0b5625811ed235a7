"""Assignment 0, the questions: small loads that show what is wrong with the starter's classes.

An answer is {"breaks": "queues", "load": [[0.0, 20, 5], ...]}: the name of an invariant, and for
each request the second in which it comes, the tokens of its prompt and those of its answer. In B
a fourth number says how many tokens the prompt has in common with the others.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm import Job, Run, simulate
from nanovllm.config import Config
from nanovllm.options import is_int, is_number, shown
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from tutorials.assignments.a0 import starter

# name -> what the sentences say when it is broken
INVARIANTS = {
    "queues": r"times in waiting and running",
    "references": r"ref_count is|are free and in use|neither free nor in a table",
    "budget": r"but max_num_batched_tokens=",
    "seats": r"but max_num_seqs=",
    "missing": r"is to compute .* are missing",
    "writes": r"is to write into",
    "moves": r"are to be moved",
}
LATEST = 10  # seconds: when the last request may come


@dataclass(frozen=True)
class Question:
    """Asks for a load that makes a class of the starter break its invariant. It is small, so the
    plain classes can always serve it."""

    invariant: str
    config: Config
    max_requests: int
    max_tokens: int  # of all prompts and answers
    why_not: Callable[[Run], str]  # what happened instead, when no rule was broken
    scheduler: type[Scheduler] = Scheduler
    has_shared: bool = False  # whether the prompts may have tokens in common

    @property
    def fields(self) -> str:
        return "seconds, prompt tokens, output tokens" + ", shared tokens" * self.has_shared

    def __call__(self, answer: Any) -> str | None:
        """What is wrong with an answer, whatever it is; None: nothing."""
        try:
            name, load = self._parts(answer)
            jobs = [self._job(i, request) for i, request in enumerate(load)]
        except ValueError as error:
            return str(error)
        num_tokens = sum(job.num_prompt_tokens + job.num_outputs for job in jobs)
        if num_tokens > self.max_tokens:
            return f"the load has {num_tokens} tokens, but at most {self.max_tokens} are allowed"
        try:
            run = simulate(
                jobs, self.config, scheduler_cls=self.scheduler, check=True, keep_steps=True
            )
        except ScheduleError as error:
            return self._what_else_is_broken(name, str(error))
        return f"no rule is broken by the load: {self.why_not(run)}"

    def _parts(self, answer: Any) -> tuple[str, list]:
        """The name and the load."""
        if not isinstance(answer, dict) or {*answer} != {"breaks", "load"}:
            form = f"{{'breaks': name, 'load': [[{self.fields}], ...]}}"
            raise ValueError(f"{shown(answer, 80)} is not of the form {form}")
        name, load = answer["breaks"], answer["load"]
        if not isinstance(name, str) or name not in INVARIANTS:
            allowed = ", ".join(INVARIANTS)
            raise ValueError(f"{shown(name, 80)} is no name of an invariant: choose from {allowed}")
        if not isinstance(load, list) or not 1 <= len(load) <= self.max_requests:
            count = f"a list of 1 to {self.max_requests} requests"
            raise ValueError(f"the load must be {count}, and not {shown(load, 80)}")
        return name, load

    def _job(self, i: int, request: Any) -> Job:
        num_fields = 4 if self.has_shared else 3
        if not isinstance(request, list | tuple) or len(request) != num_fields:
            what = f"a list [{self.fields}], and not {shown(request, 80)}"
            raise ValueError(f"request {i} must be {what}")
        time, num_prompt, num_outputs, num_shared = [*request, 0][:4]
        if not is_number(time, 0, LATEST):
            problem = f"must be a number from 0 to {LATEST}, and not {shown(time, 80)}"
            raise ValueError(f"request {i}: seconds {problem}")
        for name, value, low, high in (
            ("prompt tokens", num_prompt, 1, self.max_tokens),
            ("output tokens", num_outputs, 1, self.max_tokens),
            ("shared tokens", num_shared, 0, num_prompt),
        ):
            if not is_int(value, low, high):
                problem = f"must be an integer from {low} to {high}, and not {shown(value, 80)}"
                raise ValueError(f"request {i}: {name} {problem}")
        runs = ((1, num_shared), (i + 2, num_prompt - num_shared))
        prompt = tuple(run for run in runs if run[1] > 0)
        return Job(float(time), prompt, num_outputs, max_tokens=num_outputs)

    def _what_else_is_broken(self, name: str, error: str) -> str | None:
        broken = [name for name, signs in INVARIANTS.items() if re.search(signs, error)]
        if broken != [self.invariant]:
            return f"the load breaks something else than this class is known for: {error}"
        if name not in broken:
            return f"the load breaks another invariant than {name!r}: {error}"
        return None


def small_config(**fields: Any) -> Config:
    return Config(model="qwen3-8b", max_num_seqs=8, max_model_len=512, **fields)


def nobody_was_preempted(run: Run) -> str:
    return "no request was preempted"


def was_anything_shared(run: Run) -> str:
    if run.num_cached_tokens == 0:
        return "no block was shared"
    return "blocks were shared, but each of them was needed until all who had it ended"


def how_full_was_it(run: Run) -> str:
    fullest = max(sum(count for _, count, _ in step.items) for step in run.steps)
    return f"the fullest step had {fullest} tokens"


QUESTIONS = {
    "A": Question(
        "queues",
        small_config(num_blocks=8, max_num_batched_tokens=128),
        max_requests=3,
        max_tokens=120,
        why_not=nobody_was_preempted,
        scheduler=starter.SchedulerA,
    ),
    "B": Question(
        "references",
        small_config(
            num_blocks=8, max_num_batched_tokens=128, block_manager_cls=starter.BlockManagerB
        ),
        max_requests=2,
        max_tokens=40,
        why_not=was_anything_shared,
        has_shared=True,
    ),
    "C": Question(
        "budget",
        small_config(num_blocks=64, max_num_batched_tokens=260),
        max_requests=6,
        max_tokens=280,
        why_not=how_full_was_it,
        scheduler=starter.SchedulerC,
    ),
}
