"""Classes: what a user-defined scheduler and block manager must provide besides valid schedules."""

from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.topics.checks.blocks import check_blocks


def check_made(scheduler: Scheduler, config: Config, runner: Any) -> None:
    """Raises ScheduleError if a constructor has not called `super()`, or if the block manager has
    blocks that the KV cache does not have."""
    manager = getattr(scheduler, "block_manager", None)
    for owner, name in ((scheduler, "running"), (manager, "blocks")):
        if not hasattr(owner, name):
            raise ScheduleError(owner, "__init__", "it did nothing: does it call super()?")
    assert manager is not None
    sizes = {
        "blocks": (len(manager.blocks), runner.num_blocks),
        "host blocks": (len(manager.host_ref_counts), runner.num_host_blocks),
        "tokens per block": (manager.block_size, config.block_size),
    }
    for name, (own, given) in sizes.items():
        if own > given or (own < given and name == "tokens per block"):
            problem = f"it has {own} {name}, but the KV cache has {given}"
            raise ScheduleError(manager, "__init__", problem)


def check_kept(scheduler: Scheduler, schedule: Schedule) -> None:
    """Raises ScheduleError if a sequence does not end, or if a user's block manager has lost a
    block, or shares one by mistake. Visits every block."""
    for seq, start, num_tokens in schedule.items:
        if start + num_tokens >= seq.request.max_len:
            problem = f"{seq} has reached its end, {seq.request.max_len} tokens, and goes on"
            raise ScheduleError(scheduler, "finish", f"{problem}: does it call super()?")
    manager = scheduler.block_manager
    if type(manager) is BlockManager:
        return
    try:
        check_blocks(manager, [s for one in scheduler.unfinished() for s in one.unfinished])
    except AssertionError as error:
        what = f"the blocks of {type(manager).__name__} do not add up: {error}"
        raise ScheduleError(scheduler, "schedule", what) from error
