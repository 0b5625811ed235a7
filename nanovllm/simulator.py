"""Simulator: the real scheduler and block manager under a virtual clock. Imports no torch.

The clock goes on by what the cost model (`roofline.py`) says of each step. No model runs, so tokens
say nothing; only their number counts, and which prompts begin alike. Everything else is the code
that serves real requests.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.block_manager import BlockManager
from nanovllm.checks import check_schedule
from nanovllm.config import TOKENS_PER_STEP, Config
from nanovllm.options import is_int, is_number, shown
from nanovllm.roofline import MACHINES, SHAPES, Items, Machine, shape_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import CheckedScheduler, Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.stats import check_blocks

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
    max_tokens: int = 2048  # what the client allows; the cache must have room for so many
    extra_args: dict[str, Any] = NO_ARGS
    after: int | None = None  # index of the job that this one follows, in a conversation

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(chain.from_iterable([token] * count for token, count in self.prompt))

    @property
    def conversation(self) -> Runs:
        """Its prompt and its answer: what the prompt of the next turn begins with."""
        return (*self.prompt, (self.answer, self.num_outputs - 1), (STOP, 1))


@dataclass
class Served:
    """What became of a job. Times are in seconds since the start of the run."""

    job: Job
    arrival: float = math.inf  # while it has not arrived
    # when each output token came
    token_times: array[float] = field(default_factory=lambda: array("d"))
    num_cached_tokens: int = 0  # of its prompt, when it was first admitted
    num_preemptions: int = 0


class PlannedStep(NamedTuple):
    """One step of a run, for pictures."""

    start: float
    end: float
    # (index of the job, tokens computed, whether they belong to a prompt)
    items: list[tuple[int, int, bool]]
    running: list[int]  # indices of all that run, also of those without a part in this step


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
    kv_use: float = 0.0  # mean part of the KV blocks in use in a step, weighted by its seconds
    steps: list[PlannedStep] = field(default_factory=list)  # empty unless they were asked for


def model_config(model: str) -> dict[str, Any]:
    """The Hugging Face config of a local directory, or one of `SHAPES` by the end of its name."""
    path = Path(model) / "config.json"
    if path.exists():
        return json.loads(path.read_text())
    name = model.rpartition("/")[2].lower()
    if name not in SHAPES:
        allowed = f"it must be a directory or one of {', '.join(SHAPES)}"
        raise ValueError(f"model={shown(model)} is not allowed: {allowed}")
    return SHAPES[name]


def items_of(schedule: Schedule) -> Items:
    """Of each sequence: tokens to compute, and tokens in its context afterwards."""
    return [(num_tokens, start + num_tokens) for _, start, num_tokens in schedule.items]


# --- the simulation ---


def simulate(
    jobs: Sequence[Job],
    config: Config | None = None,
    hardware: str | Machine = "h100",
    scheduler_cls: Callable[..., Scheduler] | None = None,
    check: bool = False,
    keep_steps: bool = False,
) -> Run:
    """Serves the jobs, and says when each of their tokens came.

    The model is `config.model`, by default Qwen3-8B; without `num_blocks`, blocks fill the memory
    of the hardware. With `check`, each step is checked: for lost requests and blocks, for more
    than the limits, for answers that end too early or too late. Raises ValueError for what cannot
    run at all, and ScheduleError, with the number of the step, for a scheduler that has gone wrong.
    """
    if not isinstance(hardware, Machine) and hardware not in MACHINES:
        allowed = f"it must be one of {', '.join(MACHINES)}"
        raise ValueError(f"hardware={shown(hardware)} is not allowed: {allowed}")
    machine = MACHINES[hardware] if isinstance(hardware, str) else hardware
    config = Config(model="qwen3-8b") if config is None else config
    scheduler_cls = scheduler_cls or config.scheduler_cls or Scheduler
    return Simulation(jobs, config, machine, scheduler_cls, check).run(keep_steps)


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
    """Which job comes when. Those that follow another one come some time after its end."""

    def __init__(self, jobs: Sequence[Job]):
        self.jobs = jobs
        self.coming = [(job.time, i) for i, job in enumerate(jobs) if job.after is None]  # a heap
        heapify(self.coming)
        self.followers: dict[int, list[int]] = {}
        for i, job in enumerate(jobs):
            if job.after is not None:
                self.followers.setdefault(job.after, []).append(i)

    def until(self, now: float) -> Iterator[tuple[float, int]]:
        """Takes those that have come: (time, index of the job)."""
        while self.coming and self.coming[0][0] <= now:
            yield heappop(self.coming)

    def follow(self, index: int, now: float) -> list[int]:
        """A job has ended: its followers, which come later."""
        followers = self.followers.get(index, [])
        for follower in followers:
            heappush(self.coming, (now + self.jobs[follower].time, follower))
        return followers


class Simulation:
    """One run of `simulate`."""

    def __init__(
        self, jobs: Sequence[Job], config: Config, machine: Machine, scheduler_cls, check: bool
    ):
        model = model_config(config.model)
        limits = config.resolved(model["max_position_embeddings"], TOKENS_PER_STEP["cuda"])
        for i, job in enumerate(jobs):
            check_job(i, job, limits.max_model_len)
        self.machine = machine
        self.shape = shape_of(model, itemsize=4 if config.dtype == "float32" else 2)
        block_bytes = config.block_size * self.shape.kv_bytes
        num_blocks = config.num_blocks
        if num_blocks is None:
            num_blocks = config.num_blocks_in(self._memory_left(config), block_bytes, limits)
        num_host_blocks = config.num_host_blocks(block_bytes, limits)
        manager_cls = config.block_manager_cls or BlockManager
        self.manager: BlockManager = manager_cls(
            num_blocks, config.block_size, config.enable_prefix_caching, num_host_blocks
        )
        self.scheduler: Scheduler = scheduler_cls(limits, self.manager)
        self.checked = CheckedScheduler(self.scheduler, limits, check_schedule if check else None)
        self.check = check
        self.now = 0.0
        self.scheduler.clock = lambda: self.now
        self.arrivals = Arrivals(jobs)
        self.num_arrived = count()
        self.result = Run([Served(job) for job in jobs])
        self.unfinished: dict[str, Request] = {}

    def _memory_left(self, config: Config) -> int:
        """Bytes for the KV cache. Leaves out activations, which no cost model knows."""
        memory = self.machine.hardware.memory_bytes * config.gpu_memory_utilization
        weights = self.shape.weight_bytes
        if memory <= weights:
            what = f"the weights take {weights:,} of {memory:,.0f} bytes"
            where = self.machine.hardware.name
            raise ValueError(f"model={config.model!r} does not fit on {where}: {what}")
        return int(memory - weights)

    def run(self, keep_steps: bool) -> Run:
        while self.arrivals.coming or self.unfinished:
            if not self.unfinished:
                self.now = max(self.now, self.arrivals.coming[0][0])
            for time, index in self.arrivals.until(self.now):
                self._add(time, index)
            try:
                self._step(keep_steps)
            except ScheduleError as error:
                error.args = (f"step {self.result.num_steps + 1}, at {self.now:.3f} s: {error}",)
                raise
        result = self.result
        result.seconds = self.now
        result.kv_use /= (result.busy_seconds or 1) * len(self.manager.blocks)
        for name in (
            "num_prompt_tokens",
            "num_cached_tokens",
            "num_preemptions",
            "num_swapped_blocks",
        ):
            setattr(result, name, getattr(self.scheduler, name))
        return result

    def _add(self, time: float, index: int) -> None:
        served = self.result.requests[index]
        served.arrival = time
        job = served.job
        params = SamplingParams(
            max_tokens=job.max_tokens, stop_token_ids=[STOP], extra_args=job.extra_args
        )
        request = Request(str(index), None, job.prompt_token_ids, params, arrival_time=time)
        request.arrival = next(self.num_arrived)
        try:
            self.scheduler.add(request)
        except ValueError as error:
            raise ValueError(f"job {index}: {error}") from error
        self.unfinished[request.request_id] = request

    def _step(self, keep_steps: bool) -> None:
        running = [*self.scheduler.running]
        num_preemptions = self.scheduler.num_preemptions
        schedule = self.checked.schedule(self.unfinished)
        if self.check:
            check_queues(self.scheduler, self.unfinished.values(), running)
        if self.scheduler.num_preemptions > num_preemptions:
            for request in {*running}.difference(self.scheduler.running):
                self._served(request).num_preemptions += 1
        start = self.now
        self._go_on(schedule)
        if keep_steps:
            self.result.steps.append(self._planned_step(schedule, start))
        self.checked.update(schedule, [self._token(seq.request) for seq in schedule.sampled])
        for seq in schedule.sampled:
            if self.check:
                self._check_length(seq.request)
            if seq.finish_reason is not None:
                self._end(seq.request)

    def _check_length(self, request: Request) -> None:
        """Whether it has ended with its last token, and not before."""
        served = self._served(request)
        num_tokens = len(served.token_times)
        num_outputs = served.job.num_outputs
        is_complete = num_tokens == num_outputs
        if is_complete != request.has_ended:
            state = "has not ended" if is_complete else "has ended"
            problem = f"{request} {state} after {num_tokens} of {num_outputs} tokens"
            raise ScheduleError(self.scheduler, "update", problem)

    def _go_on(self, schedule: Schedule) -> None:
        """The clock, and what is counted."""
        moves = schedule.moves
        seconds = self.machine.seconds(
            self.shape,
            items_of(schedule),
            num_sampled=len(schedule.sampled),
            num_copies=len(moves.copies),
            num_swaps=len(moves.swaps_out) + len(moves.swaps_in),
            block_size=self.manager.block_size,
        )
        self.now += seconds
        result = self.result
        result.busy_seconds += seconds
        result.num_steps += 1
        result.num_computed_tokens += schedule.num_tokens
        result.kv_use += schedule.num_used_blocks * seconds

    def _planned_step(self, schedule: Schedule, start: float) -> PlannedStep:
        items = [
            (int(seq.request.request_id), num_tokens, len(seq) - begin > 1)
            for seq, begin, num_tokens in schedule.items
        ]
        running = [int(request.request_id) for request in self.scheduler.running]
        return PlannedStep(start, self.now, items, running)

    def _served(self, request: Request) -> Served:
        return self.result.requests[int(request.request_id)]

    def _token(self, request: Request) -> int:
        """The next token, which comes now."""
        served = self._served(request)
        served.token_times.append(self.now)
        return STOP if len(served.token_times) == served.job.num_outputs else served.job.answer

    def _end(self, request: Request) -> None:
        del self.unfinished[request.request_id]
        self._served(request).num_cached_tokens = request.num_cached_tokens or 0
        self.arrivals.follow(int(request.request_id), self.now)


# --- second reading: what can go wrong in the long run ---


def check_queues(
    scheduler: Scheduler, requests: Collection[Request], running: list[Request]
) -> None:
    """Raises ScheduleError unless each unfinished request is queued once, and each block is free or
    in use. Before the step was planned, these were `running`."""
    wrong = partial(ScheduleError, scheduler, "schedule")
    manager = scheduler.block_manager
    queued = Counter(scheduler.unfinished())
    unfinished = set(requests)
    for request in queued.keys() | unfinished:
        if queued[request] != (request in unfinished):
            state = "has not ended" if request in unfinished else "has ended"
            how = f"is {queued[request]} times in waiting and running"
            raise wrong(f"{request} {state}, but {how}")
    if running == scheduler.running and len(manager.blocks) >= 1000:
        return  # nothing has changed that is worth the time
    try:
        check_blocks(manager, [seq for request in requests for seq in request.unfinished])
    except AssertionError as error:
        raise wrong(str(error)) from None
