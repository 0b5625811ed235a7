"""Classes: what a user-defined scheduler and block manager must provide besides valid schedules."""

from typing import Any

from nanovllm.config import Config
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler


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
