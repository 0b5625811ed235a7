"""BlockManager: the page table of the KV cache (paper, sections 4.2 to 4.4). Imports no torch."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from nanovllm.sequence import Request, Sequence

EMPTY_PREFIX = 0


@dataclass(slots=True)
class Block:
    """`block_size` tokens of keys and values, for every layer.

    `key` is (identity of the prefix before this block, the block's tokens); `prefix_id` is the identity of the prefix
    that ends with this block. Both are set when the step that computes its last token is planned.
    """

    id: int
    ref_count: int = 0
    key: tuple[int, tuple[int, ...]] | None = None
    prefix_id: int = EMPTY_PREFIX


class BlockManager:
    """Hands out blocks on demand, shares blocks with equal prefixes, and keeps freed blocks findable until reused.

    A prefix is found by its exact key, never by a hash alone, so two different prompts cannot share a block by accident
    or by an attacker's design. Identities are never reused: when a block is evicted, the blocks that depend on its
    identity can no longer be found.
    """

    num_stranded_blocks = (
        0  # free blocks that the waiting request cannot use: any block can serve any sequence
    )

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
        self.free_blocks = OrderedDict.fromkeys(
            range(num_blocks)
        )  # an ordered set; the first is reused next
        self.findable: dict[tuple[int, tuple[int, ...]], Block] = {}
        self.prefix_ids = count(EMPTY_PREFIX + 1)
        self.unwritten: set[int] = set()  # findable blocks that the step being planned will compute
        self.num_moves = (
            0  # blocks that it has asked steps to copy or swap so far, see check_schedule
        )
        self.free_host_blocks = list(range(num_host_blocks))
        self.host_ref_counts = [0] * num_host_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    @property
    def num_used_blocks(self) -> int:
        return len(self.blocks) - len(self.free_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks_needed(self, request: Request) -> int:
        """Maximum blocks that the request can need at one time. The last token of a sequence is never fed back."""
        shared = len(request.prompt_token_ids) // self.block_size  # full blocks of the prompt
        return shared + request.params.n * (self.num_blocks_for(request.max_len - 1) - shared)

    # --- what the scheduler asks ---

    def num_new_blocks(self, items: Iterable[tuple[Sequence, int]]) -> int:
        """Blocks that these sequences lack to compute this many next tokens, copies included."""
        missing, writers = 0, dict[int, int]()
        for seq, num_tokens in items:
            missing += max(
                0, self.num_blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.block_table)
            )
            i = seq.num_computed_tokens // self.block_size
            for block_id in seq.block_table[i : i + 1]:  # the next token goes there
                writers[block_id] = writers.get(block_id, 0) + 1
        for (
            block_id,
            num_writers,
        ) in writers.items():  # each copies it first, but the last owner needs no copy
            missing += min(num_writers, self.blocks[block_id].ref_count - 1)
        return missing

    def can_allocate(self, items: list[tuple[Sequence, int]]) -> bool:
        num_free, most = len(self.free_blocks), 0
        for _, num_tokens in items:
            most += num_tokens + 1  # a block for each token, and a copy
        return most <= num_free or self.num_new_blocks(items) <= num_free

    def can_admit(self, request: Request, num_reserved: int = 0) -> bool:
        """Whether there are blocks for all tokens of a waiting request, besides `num_reserved` for others."""
        first, *others = request.unfinished
        needed = self.num_blocks_for(len(first.token_ids)) + num_reserved
        if others:
            needed += self.num_blocks_at_fork(request)
        lacking = needed - len(self.free_blocks)
        return lacking <= 0 or lacking <= sum(
            block.ref_count > 0 for block in self.find_prefix(first)
        )

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The blocks of the longest prefix of its tokens that can be found; does not take them.

        At most len(seq) - 1 tokens: the last one is always computed, because its logits are needed.
        """
        blocks: list[Block] = []
        prefix_id = EMPTY_PREFIX
        for end in range(self.block_size, len(seq.token_ids), self.block_size):
            block = self.findable.get(
                (prefix_id, tuple(seq.token_ids[end - self.block_size : end]))
            )
            if block is None:
                break
            blocks.append(block)
            prefix_id = block.prefix_id
        return blocks

    # --- what it tells us to do ---

    def take_prefix(self, seq: Sequence) -> None:
        """Gives a sequence the blocks that `find_prefix` finds beyond those it has, if any."""
        has = len(seq.block_table)
        assert seq.num_computed_tokens == has * self.block_size, (
            f"{seq} has blocks: is its request queued twice?"
        )
        for block in self.find_prefix(seq)[has:]:
            if block.ref_count == 0:
                del self.free_blocks[block.id]
            block.ref_count += 1
            seq.block_table.append(block.id)
            seq.prefix_ids.append(block.prefix_id)
        seq.num_computed_tokens = len(seq.block_table) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Gives `seq` the blocks for its next `num_tokens` tokens; the caller must have checked that they are free.

        The first write into a shared block needs a copy (copy-on-write, paper, section 4.4). Returns the copies to make
        before the step as [(from block, to block)]: at most one, of the block that the next token goes to.
        """
        copies, i = [], seq.num_computed_tokens // self.block_size
        if i < len(seq.block_table):
            block = self.blocks[seq.block_table[i]]
            if block.ref_count > 1:
                copies.append((block.id, self._take().id))
                seq.block_table[i] = copies[0][1]
                self.num_moves += 1
                block.ref_count -= 1
            elif block.key is not None:
                self._evict(
                    block
                )  # its content will change: it was full when this sequence forked in the middle of it
        while len(seq.block_table) * self.block_size < seq.num_computed_tokens + num_tokens:
            seq.block_table.append(self._take().id)
        return copies

    def publish(self, seq: Sequence, num_tokens: int | None = None) -> None:
        """Makes the full blocks of its first `num_tokens` tokens findable; by default, of the tokens computed so far.

        The step being planned must compute the rest. Other sequences may share these blocks in the same step, because a
        layer stores the keys and values of all tokens before any query reads them.
        """
        if not self.enable_prefix_caching:
            return
        num_tokens = seq.num_computed_tokens if num_tokens is None else num_tokens
        for i in range(len(seq.prefix_ids), num_tokens // self.block_size):
            tokens = tuple(seq.token_ids[i * self.block_size : (i + 1) * self.block_size])
            key = (seq.prefix_ids[-1] if seq.prefix_ids else EMPTY_PREFIX, tokens)
            block = self.findable.get(key)
            if (
                block is None
            ):  # otherwise another sequence computed the same prefix, and its block stays the one found
                block = self.findable[key] = self.blocks[seq.block_table[i]]
                block.key, block.prefix_id = key, next(self.prefix_ids)
                if (i + 1) * self.block_size > seq.num_computed_tokens:
                    self.unwritten.add(block.id)
            seq.prefix_ids.append(block.prefix_id)

    def free(self, seq: Sequence) -> None:
        """Frees the blocks of `seq`, last one first, so that tails are reused before the prefixes they follow."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = None
                if block.key is None:  # it cannot be found: reuse it before any cached block
                    self.free_blocks.move_to_end(block_id, last=False)
        seq.block_table, seq.prefix_ids, seq.num_computed_tokens = [], [], 0

    # --- inside ---

    def _take(self) -> Block:
        assert self.free_blocks, "there is no free block: ask can_allocate or can_admit first"
        block = self.blocks[self.free_blocks.popitem(last=False)[0]]
        if block.key is not None:
            self._evict(block)
        block.ref_count = 1
        return block

    def _evict(self, block: Block) -> None:
        """Removes the block from the prefix cache, which has it."""
        assert block.key is not None
        del self.findable[block.key]
        block.key, block.prefix_id = None, EMPTY_PREFIX

    # --- second reading: several sequences of one request (paper, section 4.4) ---

    def num_blocks_at_fork(self, request: Request) -> int:
        """Blocks that the other sequences will need in addition to those of the first, for the tokens they have now."""
        shared = len(request.prompt_token_ids) // self.block_size
        return sum(self.num_blocks_for(len(seq)) - shared for seq in request.unfinished[1:])

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> None:
        """Lets `child`, which has no blocks yet, share what `parent` has computed, or only its first `num_tokens`
        tokens."""
        assert not child.block_table and child.num_computed_tokens == 0, (
            f"{child} already has blocks"
        )
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        last = parent.block_table[num_tokens // self.block_size :][:1]
        if self.unwritten.intersection(
            last
        ):  # part of a block cannot be copied before the step that writes it
            num_tokens -= num_tokens % self.block_size
        child.num_computed_tokens = num_tokens
        child.block_table = parent.block_table[: self.num_blocks_for(num_tokens)]
        child.prefix_ids = parent.prefix_ids[: num_tokens // self.block_size]
        for block_id in child.block_table:
            self.blocks[block_id].ref_count += 1

    # --- second reading: blocks that wait in host memory (paper, section 4.5) ---

    def swap_out(self, seqs: list[Sequence], swaps_out: dict[int, int]) -> bool:
        """Assigns host blocks to the sequences' blocks, only one for a shared block (paper, section 4.5).

        Adds block -> host block to `swaps_out`, to be copied before the step. Without room for all, returns False and
        changes nothing.
        """
        tables = [seq.block_table[: self.num_blocks_for(seq.num_computed_tokens)] for seq in seqs]
        blocks = {block_id for table in tables for block_id in table} - swaps_out.keys()
        if len(blocks) > len(self.free_host_blocks):
            return False
        swaps_out |= {block_id: self.free_host_blocks.pop() for block_id in blocks}
        self.num_moves += len(blocks)
        for seq, table in zip(seqs, tables):
            seq.host_table = [swaps_out[block_id] for block_id in table]
            seq.num_host_tokens = seq.num_computed_tokens
            for host_id in seq.host_table:
                self.host_ref_counts[host_id] += 1
        return True

    def swap_in(self, seq: Sequence, swaps_in: dict[int, int]) -> None:
        """Gives a sequence that has already taken its prefix blocks for the rest of what it has in host memory.

        Adds host block -> block to `swaps_in`, to be copied before the step. The caller must have asked `can_admit`.
        """
        for host_id in seq.host_table[len(seq.block_table) :]:
            if host_id in swaps_in:
                self.blocks[swaps_in[host_id]].ref_count += 1
            else:
                swaps_in[host_id] = self._take().id
                self.num_moves += 1
            seq.block_table.append(swaps_in[host_id])
        seq.num_computed_tokens = max(seq.num_computed_tokens, seq.num_host_tokens)

    def free_host(self, seq: Sequence) -> None:
        """Frees the host blocks of `seq`."""
        for host_id in seq.host_table:
            self.host_ref_counts[host_id] -= 1
            if self.host_ref_counts[host_id] == 0:
                self.free_host_blocks.append(host_id)
        seq.host_table, seq.num_host_tokens = [], 0
