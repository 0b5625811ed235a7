"""Statistics: counters since the start, the current use of the KV cache, and whether all blocks are accounted for.

No step runs this code.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Sequence


def stats_of(llm) -> dict[str, float]:
    """The result of LLM.stats."""
    scheduler, manager = llm.scheduler, llm.block_manager
    return {
        "requests_running": len(scheduler.running),
        "requests_waiting": len(llm.replies) - len(scheduler.running),
        "kv_blocks": len(manager.blocks),
        "kv_blocks_used": manager.num_used_blocks,
        "kv_blocks_used_peak": len(manager.blocks) - llm.fewest_free_blocks,
        **{f"kv_slots_{name}": slots for name, slots in cache_usage(scheduler).items()},
        "prompt_tokens": scheduler.num_prompt_tokens,
        "prefix_cache_hit_tokens": scheduler.num_cached_tokens,
        "preemptions": scheduler.num_preemptions,
        "swapped_blocks": scheduler.num_swapped_blocks,
        "steps": llm.num_steps,
        "failed_steps": llm.num_failed_steps,
        "computed_tokens": llm.num_computed_tokens,
        "output_tokens": llm.num_output_tokens,
        "seconds": llm.seconds,
        "output_tokens_per_second": llm.num_output_tokens / llm.seconds if llm.seconds else 0.0,
    }


def cache_usage(scheduler: Scheduler) -> dict[str, int]:
    """The current use of the slots, see slot_usage."""
    requests = scheduler.running
    sequences = ((seq, request.max_len - 1) for request in requests for seq in request.unfinished)
    return slot_usage(scheduler.block_manager, sequences)


def slot_usage(manager: BlockManager, sequences: Iterable[tuple[Sequence, int]]) -> dict[str, int]:
    """Slots by use (paper, figure 2), given all sequences with blocks and the maximum tokens that each may cache. The
    first five add up to all slots; `shared` is how many more would be needed without sharing."""
    stored: dict[int, int] = {}  # per block: tokens in it now ...
    kept: dict[int, int] = {}  # ... and that may be in it at the end
    num_listed = 0
    for seq, max_tokens in sequences:
        num_listed += len(seq.block_table)
        for i, block_id in enumerate(seq.block_table):
            for slots, num_tokens in ((stored, seq.num_computed_tokens), (kept, max_tokens)):
                here = min(manager.block_size, max(0, num_tokens - i * manager.block_size))
                slots[block_id] = max(here, slots.get(block_id, 0))
    token_states, reserved, stranded = (
        sum(stored.values()),
        sum(kept.values()),
        manager.num_stranded_blocks,
    )
    return {
        "token_states": token_states,
        "reserved": reserved - token_states,
        "internal_fragmentation": manager.num_used_blocks * manager.block_size - reserved,
        "external_fragmentation": stranded * manager.block_size,
        "free": (manager.num_free_blocks - stranded) * manager.block_size,
        "shared": (num_listed - manager.num_used_blocks) * manager.block_size,
    }


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Asserts the invariants, given all unfinished sequences. For tests, since it visits every block."""
    sequences = list(sequences)
    for seq in sequences:
        assert seq.num_computed_tokens <= len(seq.block_table) * manager.block_size, (
            f"{seq} has too few blocks"
        )
    ref_counts = [block.ref_count for block in manager.blocks]
    check_owners("block", (seq.block_table for seq in sequences), ref_counts, manager.free_blocks)
    host_tables = (seq.host_table for seq in sequences)
    check_owners("host block", host_tables, manager.host_ref_counts, manager.free_host_blocks)
    for key, block in manager.findable.items():
        assert block.key == key, f"{block} can be found by another prefix: {key}"
    num_keys = sum(block.key is not None for block in manager.blocks)
    assert num_keys == len(manager.findable), (
        f"{num_keys} blocks have a key, but {len(manager.findable)} can be found"
    )


def check_owners(
    name: str, tables: Iterable[list[int]], ref_counts: list[int], free: Iterable[int]
) -> None:
    owners = Counter(chain.from_iterable(tables))
    for i, ref_count in enumerate(ref_counts):
        if ref_count or i in owners:
            assert ref_count == owners[i], (
                f"{name} {i} is in {owners[i]} tables, but its ref_count is {ref_count}"
            )
    assert owners.keys().isdisjoint(free), (
        f"these {name}s are free and in use: {owners.keys() & free}"
    )
    num_lost = len(ref_counts) - len(owners.keys() | free)
    assert num_lost == 0, f"{num_lost} {name}s are neither free nor in a table"
