"""Blocks are handed out, shared, copied, cached and freed as they should be; random use agrees with
a simple model.

Run: pytest tests/core/test_block_manager.py [-k copies]
"""

from itertools import count

import pytest
from fake_model import FakeRunner
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduling import new_sequence

from nanovllm.block_manager import Block, BlockManager, Moves
from nanovllm.processing.stats import slot_usage
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Item
from nanovllm.sequence import Request, Sequence
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.swapping.blocks import bring_back, free_host, swap_in, swap_out
from nanovllm.topics.swapping.tiers import TwoTiers


def next_item(seq: Sequence) -> Item:
    return Item(seq, seq.num_computed_tokens, 1)


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """What a step does to one sequence."""
    num_tokens = seq.num_missing_tokens if num_tokens is None else num_tokens
    manager.allocate(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    manager.cache_full_blocks(seq, seq.num_computed_tokens)


def test_blocks_come_on_demand():
    manager = BlockManager(num_blocks=8, block_size=4)
    seq = new_sequence(range(10))
    manager.take_prefix(seq)
    for num_tokens, blocks in [(3, 1), (1, 1), (1, 2), (5, 3)]:
        compute(manager, seq, num_tokens)
        assert len(seq.block_table) == blocks == manager.num_used_blocks
    manager.free(seq)
    assert manager.num_free_blocks == 8 and seq.num_computed_tokens == 0
    assert seq.block_table == seq.prefix_ids == []


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("shared", [0, 3, 4, 5, 8])
def test_hits_end_at_a_block_border_and_before_the_last_token(length, shared):
    manager = BlockManager(num_blocks=16, block_size=4)
    first = new_sequence(range(12))
    compute(manager, first)
    second = new_sequence([0 if shared else 100])  # then come tokens of its own
    second.token_ids = [i if i < shared else 100 + i for i in range(length)]
    manager.take_prefix(second)
    assert second.num_computed_tokens == min(shared, length - 1) // 4 * 4
    assert second.block_table == first.block_table[: second.num_computed_tokens // 4]
    check_blocks(manager, [first, second])


def test_a_block_is_cached_only_when_computed_or_planned():
    """Of a prompt in chunks, only what this step computes."""
    manager = BlockManager(num_blocks=8, block_size=4)
    first, second, third = (new_sequence(range(13)) for _ in range(3))
    manager.allocate(first, 13)
    manager.take_prefix(second)
    assert second.num_computed_tokens == 0
    manager.cache_full_blocks(first, 7)
    manager.take_prefix(second)
    assert second.num_computed_tokens == 4 and manager.unwritten == {first.block_table[0]}
    first.num_computed_tokens = 7
    manager.unwritten.clear()
    manager.cache_full_blocks(first, 12)
    manager.take_prefix(third)
    assert third.num_computed_tokens == 12 and manager.unwritten == {*first.block_table[1:3]}


def test_no_part_of_a_block_is_copied_before_the_step_that_writes_it():
    manager = BlockManager(num_blocks=8, block_size=4)
    parent = new_sequence(range(13))
    early = new_sequence([0, 1, 2, 3, 4, 9])
    late = new_sequence([0, 1, 2, 3, 4, 9])
    manager.allocate(parent, 13)
    manager.cache_full_blocks(parent, 8)
    parent.num_computed_tokens = 8  # as if another request had found them in the same step
    manager.fork(parent, early, 5)
    assert early.num_computed_tokens == 4 and len(early.block_table) == 1
    assert early.block_table[0] in manager.unwritten  # a full block is shared all the same
    manager.unwritten.clear()
    manager.cache_full_blocks(parent, 12)  # the next step writes the third block
    manager.fork(parent, late, 5)
    assert late.num_computed_tokens == 5 and len(late.block_table) == 2
    assert early.prefix_ids == late.prefix_ids == parent.prefix_ids[:1]
    check_blocks(manager, [parent, early, late])


def test_looking_a_prefix_up_takes_nothing():
    manager = BlockManager(num_blocks=8, block_size=4)
    seq = new_sequence(range(9))
    compute(manager, seq)
    manager.free(seq)
    before = list(manager.free_blocks)
    assert [block.prefix_id for block in manager.find_prefix(new_sequence(range(9)))] == [1, 2]
    assert list(manager.free_blocks) == before
    assert all(block.ref_count == 0 for block in manager.blocks)


def test_freed_blocks_are_a_cache_until_they_are_handed_out():
    manager = BlockManager(num_blocks=4, block_size=2)
    old = new_sequence(range(6))
    compute(manager, old)
    table = old.block_table
    manager.free(old)
    big = new_sequence([9, 9, 9])  # takes the block that was never used, then the tail of `old`
    compute(manager, big)
    assert big.block_table == [3, table[2]]
    again = new_sequence(range(6))
    manager.take_prefix(again)
    assert again.block_table == table[:2]
    check_blocks(manager, [big, again])


def test_a_block_with_nothing_to_find_is_reused_before_any_cached_one():
    manager = BlockManager(num_blocks=4, block_size=2)
    old, seq = new_sequence([7, 8]), new_sequence([1, 2, 3, 4, 5])
    for one in (old, seq):
        compute(manager, one)
    partial = seq.block_table[2]
    manager.free(old)
    manager.free(seq)
    other = new_sequence([9])
    compute(manager, other)
    assert other.block_table == [partial] and len(manager.cached_blocks) == 3


def test_least_recently_used_goes_first():
    manager = BlockManager(num_blocks=4, block_size=2)
    a, b = new_sequence([1, 1]), new_sequence([2, 2])
    for seq in (a, b):
        compute(manager, seq)
        manager.free(seq)
    again = new_sequence([1, 1, 1])  # a is used once more, so b's block is older now
    manager.take_prefix(again)
    manager.free(again)
    filler = new_sequence([3] * 6)
    compute(manager, filler)
    assert (0, (2, 2)) not in manager.cached_blocks and (0, (1, 1)) in manager.cached_blocks


def test_an_evicted_prefix_takes_its_descendants_out_of_reach():
    manager = BlockManager(num_blocks=3, block_size=2)
    chain = new_sequence([1, 2, 3, 4])
    compute(manager, chain)
    first, second = chain.block_table
    twin = new_sequence([1, 2])  # the same tokens in a block of its own, which stays uncached
    compute(manager, twin)
    assert twin.block_table[0] not in (first, second)
    assert manager.blocks[twin.block_table[0]].key is None
    assert twin.prefix_ids == chain.prefix_ids[:1]
    manager.free(chain)
    other = new_sequence([7] * 4)  # evicts both blocks of the chain
    compute(manager, other)
    manager.free(other)
    probe = new_sequence([1, 2, 3, 4, 5])
    manager.take_prefix(probe)
    assert probe.num_computed_tokens == 0
    check_blocks(manager, [twin, probe])


def test_a_fork_takes_the_cached_blocks_behind_its_own():
    manager = BlockManager(num_blocks=8, block_size=4)
    parent, child = new_sequence(range(13)), new_sequence(range(13))
    compute(manager, parent)
    manager.fork(parent, child, 4)
    manager.take_prefix(child)
    assert child.block_table == parent.block_table[:3] and child.num_computed_tokens == 12
    assert child.prefix_ids == parent.prefix_ids
    longer = new_sequence(range(17))
    manager.fork(parent, longer)
    compute(manager, longer)
    assert child.prefix_ids == parent.prefix_ids == longer.prefix_ids[:-1]
    manager.forget_prefixes()
    manager.fork(parent, other := new_sequence(range(13)), 4)
    manager.take_prefix(other)
    assert other.num_computed_tokens == 4  # nothing is found
    check_blocks(manager, [parent, child, longer, other])


def test_an_identity_is_never_given_again():
    """Else the block of 5 6 behind 1 2 3 4 is found behind 9 9."""
    manager = BlockManager(num_blocks=5, block_size=2)
    short, long, other = map(new_sequence, ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9, 9, 8, 8]))
    for seq in (short, long):  # `long` takes over the identities of the blocks of `short`
        compute(manager, seq)
    block = manager.blocks[short.block_table[0]]
    manager.free(short)
    compute(manager, other)
    assert block.key != (0, (1, 2)) and block.prefix_id not in long.prefix_ids
    assert len(manager.find_prefix(new_sequence([9, 9, 5, 6, 7]))) == 1


def test_what_leaves_the_cache_has_no_identity():
    manager = BlockManager(num_blocks=1, block_size=2)
    seq = new_sequence([1, 2])
    compute(manager, seq)
    manager.free(seq)
    manager.allocate(new_sequence([3]), 1)
    assert manager.blocks[0] == Block(0, ref_count=1)


@pytest.mark.parametrize("far", [2**16, 2**32, 2**61 - 1])
def test_no_other_tokens_are_found(far):
    """The last ones have the same hash."""
    manager = BlockManager(num_blocks=4, block_size=2)
    compute(manager, new_sequence([0, 1]))
    assert manager.find_prefix(new_sequence([0, 1 + far, 2])) == []


def test_nothing_is_found_without_prefix_caching_or_while_prompts_are_scored():
    scored = Request("r", None, [*range(9)], SamplingParams(prompt_logprobs=0))
    for is_enabled in (True, False):
        manager = BlockManager(8, 4, is_enabled)
        seq = new_sequence(range(9))
        compute(manager, seq)
        found = manager.find_prefix(new_sequence(range(9)))
        assert len(found) == len(seq.prefix_ids) == 2 * is_enabled
        assert manager.find_prefix(scored.sequences[0]) == []
    scored.prompt_logprobs.extend([{}] * 9)  # it lacks none
    manager = BlockManager(8, 4)
    compute(manager, new_sequence(range(9)))
    assert len(manager.find_prefix(scored.sequences[0])) == 2


def test_equal_tokens_after_different_prefixes_are_different_blocks():
    manager = BlockManager(num_blocks=8, block_size=2)
    for token_ids in ([1, 1, 5, 5], [2, 2]):
        compute(manager, new_sequence(token_ids))
    probe = new_sequence([2, 2, 5, 5, 0])
    manager.take_prefix(probe)
    assert probe.num_computed_tokens == 2


def test_the_first_write_into_a_shared_block_copies_it():
    manager = BlockManager(num_blocks=8, block_size=4)
    parent, children = new_sequence(range(6)), [new_sequence(range(6)) for _ in range(2)]
    compute(manager, parent)
    full, partial = parent.block_table
    for child in children:
        manager.fork(parent, child)
        child.token_ids.append(7)
    parent.token_ids.append(7)
    assert manager.num_used_blocks == 2
    assert [manager.blocks[i].ref_count for i in (full, partial)] == [3, 3]
    family = [parent, *children]
    check_blocks(manager, family)
    assert manager.num_new_blocks([next_item(seq) for seq in family]) == 2
    assert manager.num_new_blocks([next_item(parent)]) == 1
    for seq in family:
        manager.allocate(seq, 1)
    copies = manager.take_moves().copies
    assert [source for source, _ in copies] == [partial, partial]  # the last owner keeps it
    assert [seq.block_table for seq in family] == [
        [full, copies[0][1]],
        [full, copies[1][1]],
        [full, partial],
    ]
    check_blocks(manager, family)


@pytest.mark.parametrize("parent_stays", [True, False])
def test_writing_into_a_full_block_that_was_forked_in_its_middle(parent_stays):
    """It is copied if another sequence reads it. If not, it can no longer be found, since it will hold
    something else."""
    manager = BlockManager(num_blocks=8, block_size=4)
    parent, child = new_sequence(range(8)), new_sequence([0, 1, 2, 3, 4, 9])
    compute(manager, parent)
    manager.fork(parent, child, num_tokens=5)
    block = child.block_table[1]
    if not parent_stays:
        manager.free(parent)
    assert manager.num_new_blocks([next_item(child)]) == parent_stays
    manager.allocate(child, 1)
    copies = manager.take_moves().copies
    assert copies == ([(block, child.block_table[1])] if parent_stays else [])
    assert (child.block_table[1] == block) != parent_stays
    again = new_sequence([*range(8), 0])
    manager.take_prefix(again)
    assert again.num_computed_tokens == (8 if parent_stays else 4)
    check_blocks(manager, [child, again, parent])


def test_blocks_that_one_has_to_spare_are_no_use_to_another():
    """num_new_blocks: a chunk of a prompt that has all its blocks lacks none, and not less than none."""
    manager = BlockManager(num_blocks=8, block_size=4)
    chunked, decoding = new_sequence(range(16)), new_sequence(range(50, 54))
    manager.allocate(chunked, 16)
    manager.allocate(decoding, 4)
    decoding.num_computed_tokens = 4
    decoding.token_ids.append(1)
    assert manager.num_new_blocks([(chunked, 0, 3), (decoding, 4, 1)]) == 1


class Clocked(BlockManager):
    """Checks by a clock that the block that is taken is the least recently used one."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.times = [-1] * len(self.blocks)  # when each was freed
        self.clock = count()

    def release_blocks(self, block_ids):
        super().release_blocks(block_ids)
        for block_id in reversed(block_ids):
            self.times[block_id] = next(self.clock)

    def take_block(self):
        keys = {block_id: self.blocks[block_id].key for block_id in self.free_blocks}
        block = super().take_block()
        assert not keys[block.id] or all(keys.values()), "a block without a key is free"
        assert not keys[block.id] or block.id == min(keys, key=self.times.__getitem__)
        return block


class ClockedTiers(Clocked, TwoTiers):
    """Checks, too, that no evicted block is lost for which the host has room."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.host = Clocked(len(self.host.blocks), self.block_size)

    def take_block(self):
        has_room = self.host.num_free_blocks > 0
        before = set(self.cached_blocks)
        block = super().take_block()
        lost = before.difference(self.cached_blocks, self.host.cached_blocks)
        assert not (lost and has_room), lost
        return block


class RandomUse(RuleBasedStateMachine):
    """Any order of add, compute, fork, append, free, preempt and swap, against a cache that knows
    what every slot holds."""

    manager_cls = Clocked
    block_size, num_blocks, num_host_blocks = 2, 7, 9

    def __init__(self):
        super().__init__()
        self.manager = self.manager_cls(
            self.num_blocks, self.block_size, num_host_blocks=self.num_host_blocks
        )
        self.memory = FakeRunner(self.block_size)
        self.sequences: list[Sequence] = []
        self.away: list[Sequence] = []  # swapped out
        self.prefixes: dict[int | str, list[int]] = {}  # of all identities so far

    def pick(self, data) -> Sequence:
        return data.draw(st.sampled_from(self.sequences))

    def move(self) -> Moves:
        moves = self.manager.take_moves()
        self.memory.swap(moves.swaps_out, moves.swaps_in)
        self.memory.copy(moves.copies)
        return moves

    @rule(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=3))
    def admit(self, prompts):
        """Into one step, which moves, then computes all tokens."""
        plan = []
        for seq in map(new_sequence, prompts):
            if self.manager.num_blocks_for(len(seq)) > self.manager.num_free_blocks:
                continue
            self.manager.take_prefix(seq)
            num_held = len(seq.block_table)
            bring_back(self.manager, seq)
            # of what is there, nothing is overlooked
            assert len(self.manager.find_prefix(seq)) == len(seq.block_table) >= num_held
            assert seq.num_computed_tokens < len(seq)
            plan.append((seq, seq.num_computed_tokens, seq.num_missing_tokens))
            self.manager.allocate(seq, seq.num_missing_tokens)
            self.manager.cache_full_blocks(seq, len(seq))
        self.move()
        self.manager.unwritten.clear()
        for item in plan:
            self.memory.write(*item)
        for seq, _, num_tokens in plan:
            seq.num_computed_tokens += num_tokens
        self.sequences += [seq for seq, _, _ in plan]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), at_most=st.integers(1, 6))
    def compute(self, data, at_most):
        """A step of one sequence or of several."""
        seqs = data.draw(st.lists(st.sampled_from(self.sequences), min_size=1, unique_by=id))
        plan = [
            Item(seq, seq.num_computed_tokens, min(at_most, seq.num_missing_tokens))
            for seq in seqs
            if seq.num_missing_tokens > 0
        ]
        missing = self.manager.num_new_blocks(plan)
        blocks = sum(len(item.seq.block_table) for item in plan)
        if missing > self.manager.num_free_blocks:
            return
        for item in plan:
            self.manager.allocate(item.seq, item.num_tokens)
        copies = self.move().copies
        assert missing == len(copies) + sum(len(item.seq.block_table) for item in plan) - blocks
        for seq, start, num_tokens in plan:
            self.memory.write(seq, start, num_tokens)
            seq.num_computed_tokens += num_tokens
            self.manager.cache_full_blocks(seq, seq.num_computed_tokens)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        """From anywhere in what a sequence has computed, with other tokens after it."""
        parent = self.pick(data)
        num_tokens = data.draw(st.integers(0, parent.num_computed_tokens))
        tail = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        child = new_sequence(parent.token_ids[:num_tokens] + tail)
        self.manager.fork(parent, child, num_tokens)
        self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        self.pick(data).token_ids.append(token)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data):
        seq = self.pick(data)
        self.sequences.remove(seq)
        self.manager.free(seq)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def preempt_and_resume(self, data):
        seq = self.pick(data)
        self.manager.free(seq)
        self.manager.take_prefix(seq)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def swap_out(self, data):
        """Of any sequences, whether they share blocks or not. All or nothing."""
        group = data.draw(st.lists(st.sampled_from(self.sequences), min_size=1, unique_by=id))
        blocks = {block_id for seq in group for block_id in seq.block_table}
        host = self.manager.host
        room = host.num_free_blocks
        on_host = {i for i in blocks if self.manager.blocks[i].key in host.cached_blocks}
        assert swap_out(self.manager, group) == (len(blocks) <= room)
        swaps = self.move().swaps_out
        if len(blocks) > room:
            assert not swaps and host.num_free_blocks == room
            return
        assert blocks - on_host <= swaps.keys() <= blocks  # a copy may be pushed out by another
        assert room - len(blocks) <= host.num_free_blocks
        for seq in group:
            self.manager.free(seq)
            self.sequences.remove(seq)
            self.away.append(seq)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def swap_in(self, data):
        group = data.draw(st.lists(st.sampled_from(self.away), min_size=1, unique_by=id))
        # each may find all its tokens in the prefix cache, more than it has on the host
        if (
            sum(self.manager.num_blocks_for(len(seq)) for seq in group)
            > self.manager.num_free_blocks
        ):
            return
        for seq in group:
            num_tokens = seq.num_host_tokens
            self.manager.take_prefix(seq)
            bring_back(self.manager, seq)
            swap_in(self.manager, seq)
            assert (
                num_tokens <= seq.num_computed_tokens < len(seq)
                or num_tokens == seq.num_computed_tokens
            )
        self.move()
        for seq in group:
            free_host(self.manager, seq)
            self.away.remove(seq)
            self.sequences.append(seq)
            self.manager.cache_full_blocks(seq, seq.num_computed_tokens)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def abort_while_away(self, data):
        seq = data.draw(st.sampled_from(self.away))
        self.away.remove(seq)
        free_host(self.manager, seq)

    @invariant()
    def nothing_is_leaked_doubly_owned_or_stale(self):
        check_blocks(self.manager, self.sequences + self.away)
        for seq in self.sequences:
            self.memory.check(seq)
            assert len(seq.prefix_ids) == seq.num_computed_tokens // self.block_size
            for i, prefix_id in enumerate(seq.prefix_ids):
                tokens = seq.token_ids[: (i + 1) * self.block_size]
                assert self.prefixes.setdefault(prefix_id, tokens) == tokens
        assert not any(seq.prefix_ids for seq in self.away)
        for held, tier in ((self.memory.host, self.manager.host), (None, self.manager)):
            for block in tier.cached_blocks.values():  # not stale: its prefix is in it
                found = held[block.id] if held else self.memory.read(block.id)
                known = self.prefixes.get(block.prefix_id, found[-1])
                assert [*found[-1]] == [*known] and found[-1][-len(block.key[1]) :] == block.key[1]
        usage = slot_usage(self.manager, [(seq, len(seq) + 1) for seq in self.sequences])
        held = {
            self.memory.slot(seq, i)
            for seq in self.sequences
            for i in range(seq.num_computed_tokens)
        }
        room = [min(len(seq) + 1, len(seq.block_table) * self.block_size) for seq in self.sequences]
        wanted = {
            self.memory.slot(seq, i) for seq, end in zip(self.sequences, room) for i in range(end)
        }
        assert usage["token_states"] == len(held) and usage["reserved"] == len(wanted) - len(held)
        assert min(usage.values()) >= 0
        assert sum(usage.values()) - usage["shared"] == self.num_blocks * self.block_size

    def teardown(self):
        for seq in self.sequences:
            self.manager.free(seq)
        for seq in self.away:
            free_host(self.manager, seq)
        check_blocks(self.manager, [])
        assert self.manager.num_free_blocks == self.num_blocks


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class RandomUseOfTwoTiers(RandomUse):
    """The host is smaller than what is evicted."""

    manager_cls = ClockedTiers
    num_host_blocks = 5


class TestRandomUse(RandomUse.TestCase):
    settings = examples(50)


class TestRandomUseOfTwoTiers(RandomUseOfTwoTiers.TestCase):
    settings = examples(50)


@pytest.mark.slow
class TestMuchRandomUse(RandomUse.TestCase):
    settings = examples(150)
