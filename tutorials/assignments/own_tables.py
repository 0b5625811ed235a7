"""What became of each request of a run, and what its steps did: tables for students (`own.py`) and for
questions (`own_questions.py`). Times are in seconds since the start of the run."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from nanovllm import Run
from tutorials.simulation.metrics import between_tokens, latency


class RequestRow(NamedTuple):
    request: int
    replica: int
    arrival: float
    admitted: float  # when the step began that admitted it first
    first_token: float
    last_token: float
    latency: float  # from the arrival to the last token
    baseline_latency: float  # the same in the baseline's run
    longest_gap: float  # between two of its tokens
    preemptions: int
    prompt_tokens: int
    cached_tokens: int  # of its prompt, when it was first admitted
    answer_tokens: int
    computed_tokens: int  # in all steps

    @property
    def wait(self) -> float:
        return self.first_token - self.arrival

    @property
    def loss(self) -> float:
        return self.latency - self.baseline_latency

    @property
    def in_vain(self) -> int:
        """Tokens that were computed again, or guessed wrongly. The last one of an answer is never
        computed."""
        needed = self.prompt_tokens - self.cached_tokens + self.answer_tokens - 1
        return self.computed_tokens - needed


class StepRow(NamedTuple):
    replica: int
    step: int  # of this replica: 1 is the first
    start: float
    end: float
    running: int  # requests
    tokens: int
    prompt_tokens: int  # of these; also what is computed again after a preemption
    admitted: str  # numbers of requests
    preempted: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Tables:
    """Of a run that has kept its steps."""

    requests: list[RequestRow]  # by their numbers
    steps: list[StepRow]


def tables_of(run: Run, baseline: Run) -> Tables:
    return Tables(request_rows(run, baseline), step_rows(run))


def parts_of(run: Run) -> list[Run]:
    """Each replica has its own steps."""
    return run.replicas or [run]


def request_rows(run: Run, baseline: Run) -> list[RequestRow]:
    admitted: dict[int, float] = {}
    computed: Counter[int] = Counter()
    for step in chain.from_iterable(part.steps for part in parts_of(run)):
        for i in step.running:
            admitted.setdefault(i, step.start)
        for i, num_tokens, _ in step.items:
            computed[i] += num_tokens
    return [
        RequestRow(
            request=i,
            replica=served.replica,
            arrival=served.arrival,
            admitted=admitted[i],
            first_token=served.token_times[0],
            last_token=served.token_times[-1],
            latency=latency(served),
            baseline_latency=latency(baseline.requests[i]),
            longest_gap=max(between_tokens([served]), default=0.0),
            preemptions=served.num_preemptions,
            prompt_tokens=served.job.num_prompt_tokens,
            cached_tokens=served.num_cached_tokens,
            answer_tokens=len(served.token_times),
            computed_tokens=computed[i],
        )
        for i, served in enumerate(run.requests)
    ]


def step_rows(run: Run) -> list[StepRow]:
    rows: list[StepRow] = []
    for replica, part in enumerate(parts_of(run)):
        before: set[int] = set()
        for number, step in enumerate(part.steps, start=1):
            running = set(step.running)
            left = before - running
            unfinished = {i for i in left if run.requests[i].token_times[-1] > step.start}
            row = StepRow(
                replica=replica,
                step=number,
                start=step.start,
                end=step.end,
                running=len(running),
                tokens=sum(count for _, count, _ in step.items),
                prompt_tokens=sum(count for _, count, is_prompt in step.items if is_prompt),
                admitted=" ".join(map(str, sorted(running - before))),
                preempted=" ".join(map(str, sorted(unfinished))),
            )
            rows.append(row)
            before = running
    return rows
