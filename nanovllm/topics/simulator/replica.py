"""Replica: the real scheduler and block manager under a virtual clock. Imports no torch.

No model runs, so tokens say nothing; only their number counts, and which prompts begin alike.
Everything else is the code that serves real requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import TOKENS_PER_STEP, Config
from nanovllm.options import refusal
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.checks.schedules import ScheduleChecks, check_queues
from nanovllm.topics.decoding.drafts import without_draft
from nanovllm.topics.simulator.answers import JobProposer, drawn
from nanovllm.topics.simulator.cost_model import SHAPES, Items, shape_of
from nanovllm.topics.simulator.jobs import COUNTS, PlannedStep, Run, Served
from nanovllm.topics.simulator.machines import Machine
from nanovllm.topics.swapping.tiers import two_tiers


def model_config(model: str) -> dict[str, Any]:
    """The Hugging Face config of a local directory, or one of `SHAPES` by the end of its name."""
    path = Path(model) / "config.json"
    if path.exists():
        return json.loads(path.read_bytes())
    name = model.rpartition("/")[2].lower()
    if name not in SHAPES:
        raise refusal("model", model, f"it must be a directory or one of {', '.join(SHAPES)}")
    return SHAPES[name]


def items_of(schedule: Schedule) -> Items:
    """The items for the cost model: tokens to compute, and the context afterwards."""
    return [(num_tokens, start + num_tokens) for _, start, num_tokens in schedule.items]


class Replica:
    """One engine without a model, with a clock of its own.

    The clock goes on by what the cost model says of each step, so it may be ahead of those of other
    replicas by as much as a step.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        scheduler_cls: Callable[..., Scheduler],
        check: bool,
        served: list[Served],
    ):
        model = model_config(config.model)
        limits = config.resolved(model["max_position_embeddings"], TOKENS_PER_STEP["cuda"])
        self.limits = limits
        self.machine = machine
        self.num_ranks = config.tensor_parallel_size
        itemsize = 4 if config.dtype == "float32" else 2
        self.shape = shape_of(model, itemsize).shard(self.num_ranks)
        block_bytes = config.block_size * self.shape.kv_bytes
        num_blocks = config.num_blocks or self._num_blocks_that_fit(config, block_bytes)
        num_host_blocks = config.num_host_blocks(block_bytes, limits)
        manager_cls = config.block_manager_cls or BlockManager
        if config.swap_prefixes:
            manager_cls = two_tiers(manager_cls)
        self.manager: BlockManager = manager_cls(
            num_blocks, config.block_size, config.enable_prefix_caching, num_host_blocks
        )
        self.scheduler = scheduler_cls(limits, self.manager)
        self.check = check
        self.now = 0.0
        self.scheduler.clock = lambda: self.now
        self.num_arrived = count()
        self.result = Run(served)
        self.served: dict[str, Served] = {}  # of all requests that have come, by id
        self.unfinished: dict[str, Request] = {}
        if config.speculative_config is not None:
            self.scheduler.proposer = JobProposer(config.speculative_config, self.served)
        self.planner = ScheduleChecks(self.scheduler, limits, self.unfinished, check)

    def _num_blocks_that_fit(self, config: Config, block_bytes: int) -> int:
        """KV blocks beside the weights. Leaves out activations, which no cost model knows."""
        memory = self.machine.hardware.memory_bytes * config.gpu_memory_utilization
        weights = self.shape.weight_bytes
        if memory <= weights:
            what = f"the weights take {weights:,} of {memory:,.0f} bytes"
            where = self.machine.hardware.name
            raise ValueError(f"model={config.model!r} does not fit on {where}: {what}")
        return config.num_blocks_in(int(memory - weights), block_bytes, self.limits)

    def add(self, time: float, index: int, request: Request) -> None:
        """Adds the request of the job with this index, which arrives now."""
        if not self.unfinished:
            self.now = max(self.now, time)
        request.arrival = next(self.num_arrived)
        try:
            self.scheduler.add(request)
        except ValueError as error:
            raise ValueError(f"job {index}: {error}") from error
        self.served[request.request_id] = self.result.requests[index]
        self.unfinished[request.request_id] = request

    def step(self, keep_steps: bool) -> list[int]:
        """Returns the indices of the jobs that end with it. Raises ScheduleError."""
        try:
            return self._step(keep_steps)
        except ScheduleError as error:
            error.args = (f"step {self.result.num_steps + 1}, at {self.now:.3f} s: {error}",)
            raise

    def finish(self) -> Run:
        """The measurements of this replica."""
        result = self.result
        result.seconds = self.now
        result.kv_use /= (result.busy_seconds or 1) * len(self.manager.blocks)
        for name in COUNTS:
            setattr(result, name, getattr(self.scheduler, name))
        return result

    def _step(self, keep_steps: bool) -> list[int]:
        running = [*self.scheduler.running]
        schedule = self.planner.schedule()
        if self.check:
            check_queues(self.scheduler, self.scheduler.unfinished(), self.unfinished.values())
        for request in {*running}.difference(self.scheduler.running):
            self.served[request.request_id].num_preemptions += 1
        start = self.now
        self._go_on(schedule)
        if keep_steps:
            self.result.steps.append(self._planned_step(schedule, start))
        self.planner.update(schedule, drawn(self.served, schedule))
        for seq in schedule.sampled:  # the rows that are left: draft tokens that were right, too
            self.served[seq.request.request_id].token_times.append(self.now)
        if self.check:
            for seq in schedule.sampled:
                self._check_length(seq.request)
        ended = [seq.request for seq in schedule.sampled if seq.finish_reason is not None]
        for request in ended:
            del self.unfinished[request.request_id]
            self.served[request.request_id].num_cached_tokens = request.num_cached_tokens or 0
        return [int(request.request_id) for request in ended]

    def _check_length(self, request: Request) -> None:
        """Whether it has ended with its last token, and not before."""
        served = self.served[request.request_id]
        num_tokens = len(served.token_times)
        num_outputs = served.job.num_outputs
        is_complete = num_tokens == num_outputs
        if is_complete != request.has_ended:
            state = "has not ended" if is_complete else "has ended"
            problem = f"{request} {state} after {num_tokens} of {num_outputs} tokens"
            raise ScheduleError(self.scheduler, "update", problem)

    def _go_on(self, schedule: Schedule) -> None:
        """Advances the clock, and counts."""
        moves = schedule.moves
        seconds = self.machine.seconds(
            self.shape,
            items_of(schedule),
            num_sampled=len(schedule.sampled),
            num_copies=len(moves.copies),
            num_swaps=len(moves.swaps_out) + len(moves.swaps_in),
            block_size=self.manager.block_size,
            num_ranks=self.num_ranks,
        )
        self.now += seconds
        result = self.result
        result.busy_seconds += seconds
        result.num_steps += 1
        result.num_computed_tokens += schedule.num_tokens
        result.kv_use += schedule.num_used_blocks * seconds

    def _planned_step(self, schedule: Schedule, start: float) -> PlannedStep:
        items = [
            (int(seq.request.request_id), num_tokens, len(without_draft(seq)) - begin > 1)
            for seq, begin, num_tokens in schedule.items
        ]
        running = [int(request.request_id) for request in self.scheduler.running]
        return PlannedStep(start, self.now, items, running)
