"""Blocks: whether all are accounted for. No step runs this code."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain, repeat
from operator import eq
from typing import Any

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Asserts the invariants, given all unfinished sequences. Visits every block."""
    sequences = list(sequences)
    for seq in sequences:
        has_room = seq.num_computed_tokens <= len(seq.block_table) * manager.block_size
        assert has_room, f"{seq} has too few blocks"
    check_tier("block", manager, [seq.block_table for seq in sequences])
    if manager.host is not None:
        to_read = [*manager.moves.swaps_in]  # by the next step
        tables = [seq.host_table for seq in sequences]
        check_tier("host block", manager.host, [to_read, *tables])
        for key, block in manager.host.cached_blocks.items():
            twin = manager.cached_blocks.get(key, block)
            assert twin.prefix_id == block.prefix_id, f"{twin} is another prefix on the host"
    states: Any = manager  # see topics/hybrid/states.py
    if hasattr(states, "slot_owners"):
        slots = [[seq.state_slot] for seq in sequences if seq.block_table]
        free = {0, *states.free_slots}
        check_owners("slot", slots, states.slot_owners, free, "sequences, but its slot_owners")


def check_tier(name: str, manager: BlockManager, tables: list[list[int]]) -> None:
    ref_counts = [block.ref_count for block in manager.blocks]
    check_owners(name, tables, ref_counts, manager.free_blocks)
    for key, block in manager.cached_blocks.items():
        assert block.key == key, f"{block} can be found by another prefix: {key}"
    num_keys = sum(block.key is not None for block in manager.blocks)
    num_cached = len(manager.cached_blocks)
    assert num_keys == num_cached, f"{num_keys} {name}s have a key, {num_cached} can be found"


def check_owners(
    name: str,
    tables: list[list[int]],
    ref_counts: list[int],
    free: Iterable[int],
    how_often: str = "tables, but its ref_count",
) -> None:
    owners = Counter(chain.from_iterable(tables))
    listed = [*map(owners.get, range(len(ref_counts)), repeat(0))]
    if listed != ref_counts:
        i = [*map(eq, listed, ref_counts)].index(False)
        raise AssertionError(f"{name} {i} is in {listed[i]} {how_often} is {ref_counts[i]}")
    both = owners.keys() & free
    assert not both, f"these {name}s are free and in use: {both}"
    num_lost = len(ref_counts) - len(owners.keys() | free)
    assert num_lost == 0, f"{num_lost} {name}s are neither free nor in a table"
