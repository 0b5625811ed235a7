"""Small schedulers, requests and steps, without an engine.

Tests import this file. An example that does: pytest tests/core/test_scheduler.py
"""

from fake_model import FakeRunner

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request, Sequence


def new_sequence(token_ids) -> Sequence:
    return Request("r", None, list(token_ids), SamplingParams()).sequences[0]


def new_scheduler(
    num_blocks=64,
    block_size=4,
    tokens=16,
    seqs=8,
    max_model_len=64,
    cls=Scheduler,
    manager_cls=BlockManager,
    **manager,
) -> Scheduler:
    limits = Limits(max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=max_model_len)
    return cls(limits, manager_cls(num_blocks, block_size, **manager))


def new_request(arrival: int, prompt, max_tokens=4, n=1, eos=()) -> Request:
    prompt = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    request = Request(str(arrival), None, prompt, SamplingParams(max_tokens=max_tokens, n=n), eos)
    request.arrival = request.seed = arrival
    return request


def step(scheduler: Scheduler, runner: FakeRunner) -> list[tuple[str, int]]:
    """Runs a step; returns (request id, tokens computed) in the order of the batch."""
    schedule = scheduler.schedule()
    plan = [(seq.request.request_id, n) for seq, _, n in schedule.items]
    scheduler.update(schedule, *runner.run(schedule))
    return plan


def drain(scheduler: Scheduler, runner: FakeRunner) -> tuple[int, int]:
    """Runs until all is done. Returns how many tokens were computed, and the most blocks in use."""
    computed, peak = 0, 0
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        computed = computed + schedule.num_tokens
        peak = max(peak, scheduler.block_manager.num_used_blocks)
        scheduler.update(schedule, *runner.run(schedule))
    return computed, peak
