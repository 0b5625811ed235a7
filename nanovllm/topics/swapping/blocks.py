"""Swapping: which blocks wait in host memory while their request is preempted (paper, section 4.5).

The block manager counts the host's blocks, `host_cache.py` copies what is in them. No torch here.
"""

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Sequence


def swap_out(manager: BlockManager, seqs: list[Sequence]) -> bool:
    """Assigns host blocks to the sequences' blocks, only one for a shared block. They are copied
    before the next step. Without room for all, returns False and changes nothing."""
    swaps = manager.moves.swaps_out
    tables = [seq.block_table[: manager.num_blocks_for(seq.num_computed_tokens)] for seq in seqs]
    blocks = {block_id for table in tables for block_id in table} - swaps.keys()
    if len(blocks) > len(manager.free_host_blocks):
        return False
    for block_id in blocks:
        swaps[block_id] = manager.free_host_blocks.pop()
    for seq, table in zip(seqs, tables):
        seq.host_table = [swaps[block_id] for block_id in table]
        seq.num_host_tokens = seq.num_computed_tokens
        for host_id in seq.host_table:
            manager.host_ref_counts[host_id] += 1
    return True


def swap_in(manager: BlockManager, seq: Sequence) -> None:
    """Assigns blocks to the part of a swapped-out sequence that is not in the prefix cache.

    Call `can_admit` and `take_prefix` first. The contents are copied before the planned step.
    """
    swaps = manager.moves.swaps_in
    for host_id in seq.host_table[len(seq.block_table) :]:
        if host_id in swaps:  # another sequence of the request has brought it in
            manager.blocks[swaps[host_id]].ref_count += 1
        else:
            swaps[host_id] = manager.take_block().id
        seq.block_table.append(swaps[host_id])
    seq.num_computed_tokens = max(seq.num_computed_tokens, seq.num_host_tokens)


def free_host(manager: BlockManager, seq: Sequence) -> None:
    """Frees the host blocks of `seq`."""
    for host_id in seq.host_table:
        manager.host_ref_counts[host_id] -= 1
        if manager.host_ref_counts[host_id] == 0:
            manager.free_host_blocks.append(host_id)
    seq.host_table = []
    seq.num_host_tokens = 0
