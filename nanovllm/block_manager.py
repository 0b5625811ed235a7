"""BlockManager: the page table of the KV cache (paper, sections 4.2 to 4.4). Imports no torch."""

from collections import OrderedDict
from collections.abc import Iterable, Reversible
from dataclasses import dataclass, field
from itertools import count

from nanovllm.sequence import Request, Sequence

EMPTY_PREFIX = 0


@dataclass(slots=True)
class Block:
    """`block_size` tokens of keys and values, for every layer.

    `key` is (identity of the prefix before this block, the block's tokens); `prefix_id` is the
    identity of the prefix that ends with this block. Both are set when the step that computes its
    last token is planned.
    """

    id: int
    ref_count: int = 0
    key: tuple[int | str, tuple[int, ...]] | None = None
    prefix_id: int = EMPTY_PREFIX


@dataclass
class Moves:
    """The block moves that come before a step's computation: swaps out to the host, then swaps in,
    then copies. So the target of one move may be the source of an earlier one."""

    swaps_out: dict[int, int] = field(default_factory=dict)  # block -> host block
    swaps_in: dict[int, int] = field(default_factory=dict)  # host block -> block
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from block, to block)
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # of slots: topics/hybrid

    def __bool__(self) -> bool:
        return bool(self.swaps_out or self.swaps_in or self.copies or self.state_copies)


class BlockManager:
    """Hands out blocks on demand, shares blocks with equal prefixes, and keeps freed blocks
    cached until they are reused.

    A prefix is found by its exact key, never by a hash alone, so two different prompts cannot share
    a block by accident or by an attacker's design. Identities are never reused: when a block is
    evicted, the blocks that depend on its identity can no longer be found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))  # the first is reused next
        self.cached_blocks: dict[tuple[int | str, tuple[int, ...]], Block] = {}
        self.prefix_ids = count(EMPTY_PREFIX + 1)
        self.unwritten: set[int] = set()  # cached blocks that the step being planned computes
        self.moves = Moves()  # that the next step has to make
        self.host: BlockManager | None = None  # of the blocks in host memory (chapter 04)
        if num_host_blocks:
            self.host = BlockManager(num_host_blocks, block_size, enable_prefix_caching=False)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    @property
    def num_used_blocks(self) -> int:
        return len(self.blocks) - len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks_needed(self, request: Request) -> int:
        """The most blocks that the request can need at one time. The last token of a sequence is
        never fed back to the model, so it needs no slot."""
        shared = len(request.prompt_token_ids) // self.block_size  # full blocks of the prompt
        own = self.num_blocks_for(request.max_len - 1) - shared
        return shared + request.params.n * own

    def longest_that_fits(self, request: Request) -> int:
        """The largest `max_len` with which the request still fits into the whole cache."""
        shared = len(request.prompt_token_ids) // self.block_size
        own = (len(self.blocks) - shared) // request.params.n
        return (shared + own) * self.block_size + 1

    # --- what the scheduler asks ---

    def can_allocate(self, items: Iterable[tuple[Sequence, int, int]]) -> bool:
        """Whether enough blocks are free for these items of a schedule: (sequence, start,
        num_tokens)."""
        # an item takes at most this many blocks: only if they are few, it is counted exactly
        most = sum([num_tokens // self.block_size + 2 for _, _, num_tokens in items])
        num_free = len(self.free_blocks)
        return most <= num_free or self.num_new_blocks(items) <= num_free

    def num_new_blocks(self, items: Iterable[tuple[Sequence, int, int]]) -> int:
        """The number of blocks to allocate for these items, copies included."""
        missing = 0
        writers: dict[int, int] = {}  # shared block -> how many of the sequences write into it
        for seq, start, num_tokens in items:
            missing += max(0, self.num_blocks_for(start + num_tokens) - len(seq.block_table))
            i = start // self.block_size
            if i < len(seq.block_table):
                block_id = seq.block_table[i]
                if self.blocks[block_id].ref_count > 1:
                    writers[block_id] = writers.get(block_id, 0) + 1
        for block_id, num_writers in writers.items():
            # each copies it first, but the last owner needs no copy
            missing += min(num_writers, self.blocks[block_id].ref_count - 1)
        return missing

    def can_admit(self, request: Request, num_reserved: int = 0) -> bool:
        """Whether enough blocks are free for all tokens of a waiting request, in addition to
        `num_reserved` for other requests."""
        first = request.unfinished[0]
        needed = num_reserved + self.num_blocks_for(len(first)) + self.num_blocks_at_fork(request)
        if needed <= len(self.free_blocks):
            return True
        # cached blocks that other sequences use need not be allocated again
        num_in_use = sum(block.ref_count > 0 for block in self.find_prefix(first))
        return needed - num_in_use <= len(self.free_blocks)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The cached blocks of the longest prefix of the sequence, at most len(seq) - 1
        tokens: the last token is always computed, because its logits are needed. Nothing is found
        for a request that `lacks_prompt_logprobs`. The blocks are not taken yet."""
        blocks: list[Block] = []
        if seq.request.lacks_prompt_logprobs:
            return blocks
        prefix_id = seq.request.root_prefix_id
        for begin in range(0, len(seq.token_ids) - self.block_size, self.block_size):
            token_ids = tuple(seq.token_ids[begin : begin + self.block_size])
            block = self.cached_blocks.get((prefix_id, token_ids))
            if block is None:
                break
            blocks.append(block)
            prefix_id = block.prefix_id
        return blocks

    # --- changes that the scheduler asks for ---

    def take_prefix(self, seq: Sequence) -> None:
        """Shares the cached blocks of the longest prefix with the sequence. The sequence may have
        full blocks from a fork: then only the blocks behind these are taken."""
        num_held = len(seq.block_table)
        is_full = seq.num_computed_tokens == num_held * self.block_size
        assert is_full, f"{seq} has blocks: is its request queued twice?"
        for block in self.find_prefix(seq)[num_held:]:
            self.share_block(block)
            seq.block_table.append(block.id)
            seq.prefix_ids.append(block.prefix_id)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int) -> None:
        """Gives `seq` the blocks for its next `num_tokens` tokens; the caller must have checked
        that they are free. If the first of these tokens goes into a block that the sequence has,
        see `own_block`."""
        i = seq.num_computed_tokens // self.block_size
        if i < len(seq.block_table):
            self.own_block(seq, i)
        end = seq.num_computed_tokens + num_tokens
        while len(seq.block_table) * self.block_size < end:
            seq.block_table.append(self.take_block().id)

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Caches the full blocks of the sequence's first `num_tokens` tokens: from now on, other
        sequences find them. Blocks whose tokens are not all computed yet are `unwritten`: the step
        that is being planned computes them.

        If a block with this key is cached already, it stays, and the sequence takes over its
        prefix_id. Other sequences may share the blocks in the same step, because a layer stores the
        keys and values of all tokens before any query reads them. Without prefix caching, nothing
        is cached.
        """
        if not self.enable_prefix_caching:
            return
        for i in range(len(seq.prefix_ids), num_tokens // self.block_size):
            begin = i * self.block_size
            end = begin + self.block_size
            prefix_id = seq.prefix_ids[-1] if seq.prefix_ids else seq.request.root_prefix_id
            key = (prefix_id, tuple(seq.token_ids[begin:end]))
            block = self.cached_blocks.get(key)
            if block is None:  # else another one computed the same prefix: its block stays cached
                block = self.blocks[seq.block_table[i]]
                block.key = key
                block.prefix_id = self.new_prefix_id(key)
                self.cached_blocks[key] = block
                if end > seq.num_computed_tokens:
                    self.unwritten.add(block.id)
            seq.prefix_ids.append(block.prefix_id)

    def free(self, seq: Sequence) -> None:
        """Frees the blocks of `seq`, see `release_blocks`. The sequence has computed nothing then,
        and has new, empty lists."""
        self.release_blocks(seq.block_table)
        seq.block_table = []
        seq.prefix_ids = []
        seq.num_computed_tokens = 0

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. Blocks in use stay in the block tables of their sequences."""
        for block in [*self.cached_blocks.values()]:
            if block.id not in self.unwritten:
                self._evict(block)

    def take_moves(self) -> Moves:
        """All moves since the last call, for the step that is being planned. Until now, no other
        block could take the place of a host block that this step reads."""
        moves, self.moves = self.moves, Moves()
        if self.host is not None:
            self.host.release_blocks(moves.swaps_in)
        return moves

    # --- inside ---

    def take_block(self) -> Block:
        """Takes the free block that was freed first. It leaves the prefix cache, and has one
        owner."""
        assert self.free_blocks, "there is no free block: ask can_allocate or can_admit first"
        block_id, _ = self.free_blocks.popitem(last=False)
        block = self.blocks[block_id]
        if block.key is not None:
            self._evict(block)
        block.ref_count = 1
        return block

    def share_block(self, block: Block) -> None:
        """Gives a block one more owner."""
        if block.ref_count == 0:
            del self.free_blocks[block.id]
        block.ref_count += 1

    def release_blocks(self, block_ids: Reversible[int]) -> None:
        """Takes an owner from each block, the last one first, so that tails are reused before the
        prefixes they follow. A block that cannot be found is reused before all cached ones."""
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = None
                if block.key is None:  # it cannot be found: reuse it before any cached block
                    self.free_blocks.move_to_end(block_id, last=False)

    def new_prefix_id(self, key: tuple[int | str, tuple[int, ...]]) -> int:
        """The identity of a prefix that enters the cache."""
        return next(self.prefix_ids)

    def _evict(self, block: Block) -> None:
        """Removes a cached block from the prefix cache. Its identity is forgotten."""
        assert block.key is not None
        del self.cached_blocks[block.key]
        block.key = None
        block.prefix_id = EMPTY_PREFIX

    # --- second reading: several sequences of one request (paper, section 4.4) ---

    def num_blocks_at_fork(self, request: Request) -> int:
        """The number of blocks that the other sequences of the request will need at the fork, in
        addition to those of the first sequence."""
        shared = len(request.prompt_token_ids) // self.block_size
        return sum(self.num_blocks_for(len(seq)) - shared for seq in request.unfinished[1:])

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> None:
        """Lets `child`, which has no blocks yet, share what `parent` has computed, or only its
        first `num_tokens` tokens. If a last, partly shared block is `unwritten`, only full blocks
        are shared: the child will copy its last block before the step that writes it."""
        is_new = not child.block_table and child.num_computed_tokens == 0
        assert is_new, f"{child} already has blocks"
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        num_full = num_tokens // self.block_size
        if num_tokens % self.block_size and parent.block_table[num_full] in self.unwritten:
            # part of a block cannot be copied before the step that writes it
            num_tokens = num_full * self.block_size
        child.num_computed_tokens = num_tokens
        child.block_table = parent.block_table[: self.num_blocks_for(num_tokens)]
        child.prefix_ids = parent.prefix_ids[:num_full]
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1

    def own_block(self, seq: Sequence, i: int) -> None:
        """Prepares block `i` of the sequence's table for a write of this sequence. A shared block
        is copied before the step (copy-on-write, paper, section 4.4). A cached block that only
        this sequence uses leaves the prefix cache."""
        block = self.blocks[seq.block_table[i]]
        if block.ref_count > 1:
            seq.block_table[i] = self.take_block().id
            self.moves.copies.append((block.id, seq.block_table[i]))
            block.ref_count -= 1
        elif block.key is not None:
            # the sequence shares only its first tokens: what is written makes the key wrong
            self._evict(block)
