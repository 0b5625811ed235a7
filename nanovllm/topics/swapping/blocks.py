"""Swapping: which blocks are copied to host memory, and back (paper, section 4.5).

The host's blocks have a block manager of their own, `BlockManager.host`. `host_cache.py` copies
what is in them. No torch here.
"""

from nanovllm.block_manager import Block, BlockManager
from nanovllm.sequence import Sequence


def host_of(manager: BlockManager) -> BlockManager:
    assert manager.host is not None, "there are no host blocks"
    return manager.host


# --- blocks of requests that are preempted ---


def swap_out(manager: BlockManager, seqs: list[Sequence]) -> bool:
    """Assigns host blocks to the sequences' blocks, only one for a shared block. They are copied
    before the next step. Without room for all, returns False and changes nothing."""
    tables = [seq.block_table[: manager.num_blocks_for(seq.num_computed_tokens)] for seq in seqs]
    blocks = {block_id for table in tables for block_id in table}
    if len(blocks - manager.moves.swaps_out.keys()) > host_of(manager).num_free_blocks:
        return False
    for seq, table in zip(seqs, tables):
        seq.host_table = [copy_out(manager, manager.blocks[block_id]).id for block_id in table]
        seq.num_host_tokens = seq.num_computed_tokens
    return True


def swap_in(manager: BlockManager, seq: Sequence) -> None:
    """Assigns blocks to the part of a swapped-out sequence that is not in the prefix cache.

    Call `can_admit` and `take_prefix` first. The contents are copied before the planned step.
    """
    for host_id in seq.host_table[len(seq.block_table) :]:
        twin = host_of(manager).blocks[host_id]
        seq.block_table.append(copy_in(manager, twin).id)
    seq.num_computed_tokens = max(seq.num_computed_tokens, seq.num_host_tokens)


def free_host(manager: BlockManager, seq: Sequence) -> None:
    """Frees the host blocks of `seq`."""
    host_of(manager).release_blocks(seq.host_table)
    seq.host_table = []
    seq.num_host_tokens = 0


# --- prefixes: see tiers.py ---


def bring_back(manager: BlockManager, seq: Sequence) -> int:
    """Takes the blocks that follow in the sequence's prefix, from both tiers. Returns how many come
    from the host.

    Call `can_admit` and `take_prefix` first. The contents are copied before the planned step, and
    the blocks are cached at once: other sequences of the step share them.
    """
    host = host_of(manager)
    found: list[tuple[BlockManager, Block]] = []
    twins: list[int] = []  # host blocks
    size = manager.block_size
    prefix_id = seq.prefix_ids[-1] if seq.prefix_ids else seq.request.root_prefix_id
    end = 0 if seq.request.lacks_prompt_logprobs else len(seq.token_ids) - size
    for begin in range(len(seq.block_table) * size, end, size):
        key = (prefix_id, tuple(seq.token_ids[begin : begin + size]))
        tier = manager if key in manager.cached_blocks else host
        block = tier.cached_blocks.get(key)
        if block is None or len(twins) >= manager.num_free_blocks:
            break
        tier.share_block(block)  # now: the blocks before this one may push others out
        found.append((tier, block))
        twins += [block.id] if tier is host else []
        prefix_id = block.prefix_id
    for tier, block in found:
        if tier is host:
            twin = block
            block = copy_in(manager, twin)
            label(manager, block, twin)
        seq.block_table.append(block.id)
        seq.prefix_ids.append(block.prefix_id)
    seq.num_computed_tokens += len(found) * size
    host.release_blocks(twins)
    return len(twins)


# --- both ---


def copy_out(manager: BlockManager, block: Block) -> Block:
    """A host block that has, or gets before the next step, what is in this block. The host block
    has one more owner. One must be free."""
    host = host_of(manager)
    copies = manager.moves.swaps_out
    twin = host.cached_blocks.get(block.key) if block.key else None
    if twin is None and block.id in copies:  # another sequence of the request shares it
        twin = host.blocks[copies[block.id]]
    if twin is not None:
        host.share_block(twin)
        return twin
    twin = host.take_block()
    copies[block.id] = twin.id
    if block.key and host.enable_prefix_caching:
        label(host, twin, block)
    return twin


def copy_in(manager: BlockManager, twin: Block) -> Block:
    """A block that gets what is in this host block before the planned step. It has one more owner.
    The host block has one, too, until `take_moves`: so nothing overwrites it before it is read."""
    copies = manager.moves.swaps_in
    if twin.id in copies:  # another sequence of the request has brought it in
        block = manager.blocks[copies[twin.id]]
        manager.share_block(block)
        return block
    host_of(manager).share_block(twin)
    block = manager.take_block()
    copies[twin.id] = block.id
    return block


def label(manager: BlockManager, block: Block, twin: Block) -> None:
    """Caches a block as the prefix that its twin in the other tier is."""
    assert twin.key is not None
    block.key = twin.key
    block.prefix_id = twin.prefix_id
    manager.cached_blocks[twin.key] = block
