"""Checks: what can be wrong with the items of a schedule. For schedulers that are not ours."""

from collections.abc import Callable
from functools import partial

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.options import shown
from nanovllm.schedule import AnyScheduler, Item, Schedule, ScheduleError
from nanovllm.sequence import Sequence

Wrong = Callable[[str], ScheduleError]


def check_schedule(schedule: Schedule, scheduler: AnyScheduler, limits: Limits) -> None:
    """Raises ScheduleError if the items of the schedule cannot be run."""
    wrong = partial(ScheduleError, scheduler, "schedule")
    manager = scheduler.block_manager
    running = set(scheduler.running)
    seen: set[Sequence] = set()
    last_ones: list[int] = []  # items with the last token of their sequence
    for i, item in enumerate(schedule.items):
        if not isinstance(item, Item):
            raise wrong(f"{shown(item)} is in the schedule, and not an Item")
        seq, start, num_tokens = item
        if seq in seen:
            raise wrong(f"{seq} is in the schedule twice")
        seen.add(seq)
        if seq.request not in running or seq.finish_reason is not None:
            why = "it has ended, or its request is not in scheduler.running"
            raise wrong(f"{seq} is in the schedule, but {why}")
        end = start + num_tokens
        if num_tokens < 1 or end > len(seq.token_ids):
            missing = f"{seq.num_missing_tokens} are missing"
            raise wrong(f"{seq} is to compute {num_tokens} tokens, but {missing}")
        if start != seq.num_computed_tokens:
            raise wrong(f"{seq} is to compute tokens from {start} on, but that is not the next one")
        if end > len(seq.block_table) * manager.block_size:
            lacks = "lacks blocks for them: allocate them first"
            raise wrong(f"{seq} is to compute {num_tokens} tokens, but {lacks}")
        block_id = seq.block_table[start // manager.block_size]
        if manager.blocks[block_id].ref_count > 1 and block_id not in manager.unwritten:
            others = "which others read: allocate copies it first"
            raise wrong(f"{seq} is to write into block {block_id}, {others}")
        if end == len(seq.token_ids):
            last_ones.append(i)
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        total = schedule.num_tokens if name == "max_num_batched_tokens" else len(schedule.items)
        limit = getattr(limits, name)
        if total > limit:
            raise wrong(f"the schedule has {total} {name.split('_')[-1]}, but {name}={limit}")
    check_sampled(schedule, last_ones, wrong)
    check_published(schedule, manager, wrong)
    if manager.moves:
        raise wrong("blocks are to be moved, but the schedule lacks them: call take_moves last")


def check_sampled(schedule: Schedule, last_ones: list[int], wrong: Wrong) -> None:
    """Whether those get a next token whose last one is computed, and all samples of a request
    together."""
    sampled = set(schedule.sampled)
    is_complete = len(sampled) == len(schedule.sampled_from)
    if not is_complete or [*dict.fromkeys(schedule.sampled_from)] != last_ones:
        raise wrong("who gets a token does not follow from its items: only commit adds an item")
    for request in {seq.request for seq in sampled if seq.request.params.n > 1}:
        unfinished = request.unfinished
        num_drawn = len(sampled.intersection(unfinished))
        if num_drawn < len(unfinished):
            who = f"{num_drawn} of {len(unfinished)} sequences of {request.request_id}"
            raise wrong(f"{who} would get a token: it must be all or none")


def check_published(schedule: Schedule, manager: BlockManager, wrong: Wrong) -> None:
    """Whether the step writes all blocks that can be found already."""
    if not manager.unwritten:
        return
    written: set[int] = set()
    for seq, start, num_tokens in schedule.items:
        first = start // manager.block_size
        last = (start + num_tokens) // manager.block_size
        written.update(seq.block_table[first:last])
    lost = manager.unwritten - written
    if lost:
        raise wrong(
            f"no sequence computes blocks {lost}, which can be found: keep what is committed"
        )
