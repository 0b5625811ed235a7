"""Statistics: counters since the start, and the current use of the KV cache."""

from collections import Counter
from collections.abc import Iterable

from nanovllm.block_manager import BlockManager
from nanovllm.schedule import Counts
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence


def stats_of(
    scheduler: Scheduler, counts: Counts, num_unfinished: int, num_failed_steps: int
) -> dict[str, float]:
    """The result of LLM.stats."""
    manager = scheduler.block_manager
    speed = counts.output_tokens / counts.seconds if counts.seconds else 0.0
    return {
        "requests_running": len(scheduler.running),
        "requests_waiting": num_unfinished - len(scheduler.running),
        "kv_blocks": len(manager.blocks),
        "kv_blocks_used": manager.num_used_blocks,
        "kv_blocks_used_peak": counts.peak_blocks,
        **{f"kv_slots_{name}": slots for name, slots in cache_usage(scheduler).items()},
        "prompt_tokens": scheduler.num_prompt_tokens,
        "prefix_cache_hit_tokens": scheduler.num_cached_tokens,
        "host_cache_hit_tokens": scheduler.num_host_cached_tokens,
        "preemptions": scheduler.num_preemptions,
        "swapped_blocks": scheduler.num_swapped_blocks,
        **(scheduler.proposer.stats if scheduler.proposer else {}),
        "steps": counts.steps,
        "failed_steps": num_failed_steps,
        "computed_tokens": counts.computed_tokens,
        "output_tokens": counts.output_tokens,
        "wasted_tokens": counts.wasted_tokens,
        "seconds": counts.seconds,
        "output_tokens_per_second": speed,
    }


def cache_usage(scheduler: Scheduler) -> dict[str, int]:
    """The current use of the slots, see slot_usage."""
    requests = scheduler.running
    sequences = ((seq, request.max_len - 1) for request in requests for seq in request.unfinished)
    return slot_usage(scheduler.block_manager, sequences)


def slot_usage(manager: BlockManager, sequences: Iterable[tuple[Sequence, int]]) -> dict[str, int]:
    """Slots by use (paper, figure 2), given all sequences with blocks and the maximum tokens that
    each may cache. The first five add up to all slots: any free block can be used, so there is no
    external fragmentation. `shared` is how many more would be needed without sharing."""
    size = manager.block_size
    stored: Counter[int] = Counter()  # per block: tokens in it now ...
    kept: Counter[int] = Counter()  # ... and that may be in it at the end
    num_listed = 0
    for seq, max_tokens in sequences:
        num_listed += len(seq.block_table)
        for i, block_id in enumerate(seq.block_table):
            num_now = min(size, max(0, seq.num_computed_tokens - i * size))
            num_at_end = min(size, max(0, max_tokens - i * size))
            stored[block_id] = max(num_now, stored[block_id])
            kept[block_id] = max(num_at_end, kept[block_id])
    reserved = kept.total()
    return {
        "token_states": stored.total(),
        "reserved": reserved - stored.total(),
        "internal_fragmentation": manager.num_used_blocks * size - reserved,
        "external_fragmentation": 0,
        "free": manager.num_free_blocks * size,
        "shared": (num_listed - manager.num_used_blocks) * size,
    }
