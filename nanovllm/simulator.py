"""Simulator: the real scheduler and block manager under a virtual clock. Imports no torch.

The clock goes on by what the cost model (`roofline.py`) says of each step. No model runs, so tokens say nothing; only
their number counts, and which prompts begin alike. Everything else is the code that serves real requests.
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
from nanovllm.config import Config
from nanovllm.options import is_int, is_number, shown
from nanovllm.roofline import HARDWARE, SHAPES, Hardware, Shape, shape_of, work_of
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Schedule, ScheduleError, Scheduler, check_schedule
from nanovllm.sequence import Request
from nanovllm.stats import check_blocks

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
    max_tokens: int = 2048  # what the client allows; the cache must have room for so many
    extra_args: dict[str, Any] = NO_ARGS
    after: int | None = (
        None  # index of the job that this one follows, as the next turn of a conversation
    )

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
    token_times: array[float] = field(
        default_factory=lambda: array("d")
    )  # when each output token came
    num_cached_tokens: int = 0  # of its prompt, when it was first admitted
    num_preemptions: int = 0


class PlannedStep(NamedTuple):
    """One step of a run, for pictures."""

    start: float
    end: float
    items: list[
        tuple[int, int, bool]
    ]  # (index of the job, tokens computed, whether they belong to a prompt)
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
    kv_use: float = (
        0.0  # mean part of the KV blocks in use while steps ran, weighted by their seconds
    )
    steps: list[PlannedStep] = field(default_factory=list)  # empty unless they were asked for


# --- what a step costs ---


@dataclass(frozen=True)
class Machine:
    """Hardware as it is in use: kernels reach a part of each ceiling, and every step has work beside them.

    The default shares and overheads are assumptions. For a machine that you have, measure them.
    """

    hardware: Hardware
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    seconds_per_step: float = 1e-3  # planning, launching, sampling
    seconds_per_sequence: float = 0.0
    host_bytes_per_second: float = 25e9  # to the host's memory and back: PCIe 4.0 with 16 lanes

    def seconds(self, shape: Shape, schedule: Schedule, block_size: int) -> float:
        items = items_of(schedule)
        work = work_of(shape, items, len(schedule.sampled_items))
        copied = 2 * len(schedule.copies) * block_size * shape.kv_bytes
        reading = (work.bytes + copied) / (self.hardware.bytes_per_second * self.bandwidth_share)
        computing = work.flops / (self.hardware.flops_per_second * self.flops_share)
        overhead = self.seconds_per_step + self.seconds_per_sequence * len(items)
        return max(reading, computing) + overhead + self.swap_seconds(shape, schedule, block_size)

    def swap_seconds(self, shape: Shape, schedule: Schedule, block_size: int) -> float:
        num_swaps = len(schedule.swaps_out) + len(schedule.swaps_in)
        return num_swaps * block_size * shape.kv_bytes / self.host_bytes_per_second


def items_of(schedule: Schedule) -> list[tuple[int, int]]:
    """Of each sequence: tokens to compute, and tokens in its context afterwards, as in `roofline.Step`. To be called
    before the step has run."""
    return [
        (num_tokens, seq.num_computed_tokens + num_tokens) for seq, num_tokens in schedule.items
    ]


MACHINES = {name: Machine(hardware) for name, hardware in HARDWARE.items()}
# one thread with the embedded model in float32, fitted to 1,580 steps: tutorials/results/simulator_error.json
XEON = Hardware("Intel Xeon, one thread", 2.34e9, 70.7e9, 24e9)
MACHINES["cpu"] = Machine(XEON, 1.0, 1.0, 2.5e-3, 6.3e-5, 4e9)


def model_config(model: str) -> dict[str, Any]:
    """The Hugging Face config of a local directory, or of one of `SHAPES` by the end of its name."""
    path, name = Path(model) / "config.json", model.rpartition("/")[2].lower()
    if not path.exists() and name not in SHAPES:
        raise ValueError(
            f"model={shown(model)} is not allowed: it must be a directory or one of {', '.join(SHAPES)}"
        )
    return json.loads(path.read_text()) if path.exists() else SHAPES[name]


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

    The model is `config.model`, by default Qwen3-8B; without `num_blocks`, blocks fill the memory of the hardware. With
    `check`, each step is checked for lost requests and blocks. Raises ValueError for what cannot run at all, and
    ScheduleError, with the number of the step, for a scheduler that has gone wrong.
    """
    if not isinstance(hardware, Machine) and hardware not in MACHINES:
        raise ValueError(
            f"hardware={shown(hardware)} is not allowed: it must be one of {', '.join(MACHINES)}"
        )
    config = Config(model="qwen3-8b") if config is None else config
    machine = MACHINES[hardware] if isinstance(hardware, str) else hardware
    return Simulation(
        jobs, config, machine, scheduler_cls or config.scheduler_cls or Scheduler, check
    ).run(keep_steps)


def check_job(index: int, job: Job, max_model_len: int) -> None:
    """Raises ValueError for a job that could not get all its tokens."""
    most = min(job.max_tokens, max_model_len - job.num_prompt_tokens)
    for name, is_allowed, allowed in (
        ("time", is_number(job.time, 0), "a number of seconds, 0 or more"),
        ("prompt", job.num_prompt_tokens > 0, "at least one token"),
        (
            "num_outputs",
            is_int(job.num_outputs, 1, most),
            f"from 1 to {most}, by max_tokens and {max_model_len=}",
        ),
        (
            "after",
            job.after is None or is_int(job.after, 0, index - 1),
            "None or the index of an earlier job",
        ),
    ):
        if not is_allowed:
            raise ValueError(
                f"job {index}: {name}={shown(getattr(job, name))} is not allowed: it must be {allowed}"
            )


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
        model, self.check, self.now = model_config(config.model), check, 0.0
        self.machine, self.shape = (
            machine,
            shape_of(model, itemsize=4 if config.dtype == "float32" else 2),
        )
        limits = config.resolved(model["max_position_embeddings"], 8192)
        num_useful_blocks = limits.max_num_seqs * -(-limits.max_model_len // config.block_size)
        num_blocks = config.num_blocks or min(self._num_blocks_that_fit(config), num_useful_blocks)
        num_host_blocks = 0
        if config.preemption_mode == "swap":
            num_host_blocks = int(
                config.swap_gib * 2**30 / (config.block_size * self.shape.kv_bytes)
            )
        manager_cls = config.block_manager_cls or BlockManager
        self.manager = manager_cls(
            num_blocks, config.block_size, config.enable_prefix_caching, num_host_blocks
        )
        self.scheduler = scheduler_cls(limits, self.manager)
        self.scheduler.clock = lambda: self.now
        self.max_idle_steps, self.idle_steps = (
            limits.max_model_len,
            0,
        )  # no prompt needs more, at a token per step
        self.arrivals, self.result = Arrivals(jobs), Run([Served(job) for job in jobs])
        self.unfinished: dict[Request, Served] = {}
        self.arrived = count()
        for i, job in enumerate(jobs):
            check_job(i, job, limits.max_model_len)

    def _num_blocks_that_fit(self, config: Config) -> int:
        """Leaves out activations, which no cost model knows."""
        memory = self.machine.hardware.memory_bytes * config.gpu_memory_utilization
        num_blocks = int(
            (memory - self.shape.weight_bytes) // (config.block_size * self.shape.kv_bytes)
        )
        if num_blocks < 1:
            weights = f"the weights take {self.shape.weight_bytes:,} of {memory:,.0f} bytes"
            raise ValueError(
                f"model={config.model!r} does not fit on {self.machine.hardware.name}: {weights}"
            )
        return num_blocks

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
        result, scheduler = self.result, self.scheduler
        result.num_prompt_tokens, result.num_cached_tokens = (
            scheduler.num_prompt_tokens,
            scheduler.num_cached_tokens,
        )
        result.num_preemptions, result.num_swapped_blocks = (
            scheduler.num_preemptions,
            scheduler.num_swapped_blocks,
        )
        result.seconds, result.kv_use = (
            self.now,
            result.kv_use / (result.busy_seconds or 1) / len(self.manager.blocks),
        )
        return result

    def _add(self, time: float, index: int) -> None:
        served = self.result.requests[index]
        job, served.arrival = served.job, time
        params = SamplingParams(
            max_tokens=job.max_tokens, stop_token_ids=[STOP], extra_args=job.extra_args
        )
        request = Request(str(index), None, job.prompt_token_ids, params, arrival_time=time)
        request.arrival = next(self.arrived)
        try:
            self.scheduler.add(request)
        except ValueError as error:
            raise ValueError(f"job {index}: {error}") from error
        self.unfinished[request] = served

    def _step(self, keep_steps: bool) -> None:
        scheduler, result, moves = self.scheduler, self.result, self.manager.num_moves
        before, num_preemptions = [*scheduler.running], scheduler.num_preemptions
        schedule = scheduler.schedule()
        sampled = schedule.sampled_items
        if self.check or not schedule.items:
            check_step(schedule, scheduler, self.unfinished, before, moves)
        self.idle_steps = 0 if sampled else self.idle_steps + 1
        if self.idle_steps > self.max_idle_steps:
            raise ScheduleError(
                scheduler, "schedule", f"nobody has got a token for {self.idle_steps} steps"
            )
        if scheduler.num_preemptions > num_preemptions:
            for request in {*before}.difference(scheduler.running):
                self.unfinished[request].num_preemptions += 1
        start, seconds = (
            self.now,
            self.machine.seconds(self.shape, schedule, self.manager.block_size),
        )
        self.now += seconds
        result.busy_seconds += seconds
        result.num_steps += 1
        result.num_computed_tokens += schedule.num_tokens
        result.kv_use += self.manager.num_used_blocks * seconds
        if keep_steps:
            items = [
                (int(seq.request.request_id), n, seq.num_missing_tokens > 1)
                for seq, n in schedule.items
            ]
            running = [int(request.request_id) for request in scheduler.running]
            result.steps.append(PlannedStep(start, self.now, items, running))
        scheduler.update(schedule, [self._token(seq.request) for _, seq in sampled])
        for _, seq in sampled:
            if seq.finish_reason is not None:
                self._end(seq.request)

    def _token(self, request: Request) -> int:
        """The next token, which comes now."""
        served = self.unfinished[request]
        served.token_times.append(self.now)
        return STOP if len(served.token_times) == served.job.num_outputs else served.job.answer

    def _end(self, request: Request) -> None:
        served = self.unfinished.pop(request)
        served.num_cached_tokens = request.num_cached_tokens or 0
        self.arrivals.follow(int(request.request_id), self.now)


# --- second reading: what can go wrong in the long run ---


def check_step(
    schedule: Schedule,
    scheduler: Scheduler,
    requests: Collection[Request],
    running: list[Request],
    moves: int,
) -> None:
    """Raises ScheduleError unless the step can be run, each unfinished request is queued once, and each block is free
    or in use. Before it was planned, these were `running`, and the block manager had asked for so many moves."""
    check_schedule(schedule, scheduler, [request.request_id for request in requests], moves)
    manager = scheduler.block_manager
    queued, wrong = Counter(scheduler.unfinished()), partial(ScheduleError, scheduler, "schedule")
    for request in queued.keys() | requests:
        state = "has not ended" if request in requests else "has ended"
        if queued[request] != (request in requests):
            raise wrong(f"{request} {state}, but is {queued[request]} times in waiting and running")
    try:
        if running != scheduler.running or len(manager.blocks) < 1000:  # otherwise it takes long
            check_blocks(manager, [seq for request in requests for seq in request.unfinished])
    except AssertionError as error:
        raise wrong(str(error)) from None
