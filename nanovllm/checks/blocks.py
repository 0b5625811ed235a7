"""Blocks: whether all are accounted for. No step runs this code."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain, repeat

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Asserts the invariants, given all unfinished sequences. Visits every block."""
    sequences = list(sequences)
    for seq in sequences:
        has_room = seq.num_computed_tokens <= len(seq.block_table) * manager.block_size
        assert has_room, f"{seq} has too few blocks"
    ref_counts = [block.ref_count for block in manager.blocks]
    check_owners("block", (seq.block_table for seq in sequences), ref_counts, manager.free_blocks)
    host_tables = (seq.host_table for seq in sequences)
    check_owners("host block", host_tables, manager.host_ref_counts, manager.free_host_blocks)
    others = [b for key, b in manager.findable.items() if b.key is not key and b.key != key]
    assert not others, f"these blocks can be found by another prefix: {others}"
    num_keys = len(manager.blocks) - [block.key for block in manager.blocks].count(None)
    num_findable = len(manager.findable)
    assert num_keys == num_findable, f"{num_keys} blocks have a key, {num_findable} can be found"


def check_owners(
    name: str, tables: Iterable[list[int]], ref_counts: list[int], free: Iterable[int]
) -> None:
    owners = Counter(chain.from_iterable(tables))
    listed = [*map(owners.get, range(len(ref_counts)), repeat(0))]
    for i, (ref_count, num_tables) in enumerate(zip(ref_counts, listed)):
        assert ref_count == num_tables, (
            f"{name} {i} is in {num_tables} tables, but its ref_count is {ref_count}"
        )
    both = owners.keys() & free
    assert not both, f"these {name}s are free and in use: {both}"
    num_lost = len(ref_counts) - len(owners.keys() | free)
    assert num_lost == 0, f"{num_lost} {name}s are neither free nor in a table"
