"""Routers, without Ray: what they choose, and how near their picture of a replica's cache comes to the real one.

Run: pytest tests/routing/test_router.py
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.block_manager import BlockManager
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Request
from nanovllm.topics.routing.router import (
    LeastLoaded,
    PrefixAffinity,
    PrefixCache,
    RoundRobin,
    Router,
)

BLOCK = 4


def request(*token_ids: int) -> Request:
    return Request("", None, [*token_ids], SamplingParams())


def prefixes_of(token_ids: list[int]) -> list[int]:
    return Router(BLOCK, 0).prefixes(request(*token_ids))


def test_round_robin_serves_all_alike():
    router = RoundRobin(BLOCK, 100)
    loads = {"a": 5, "b": 0, "c": 0}
    assert Counter(router.choose(request(1), loads) for _ in range(30)) == {
        "a": 10,
        "b": 10,
        "c": 10,
    }


def test_the_least_loaded_and_among_equals_each_in_turn():
    router = LeastLoaded(BLOCK, 100)
    assert router.choose(request(1), {"a": 2, "b": 1, "c": 3}) == "b"
    assert Counter(router.choose(request(1), {"a": 1, "b": 1, "c": 2}) for _ in range(30))["c"] == 0
    assert {router.choose(request(1), {"a": 0, "b": 0}) for _ in range(2)} == {"a", "b"}


def test_a_conversation_stays_where_it_is():
    router = PrefixAffinity(BLOCK, 100)
    loads = dict.fromkeys("abc", 0)
    history = {user: [100 + user] * 9 for user in range(6)}
    first = {user: router.choose(request(*history[user]), loads) for user in history}
    assert Counter(first.values()) == {"a": 2, "b": 2, "c": 2}  # new conversations go around
    for turn in range(5):
        for user in history:
            history[user] += [turn] * 7
            assert router.choose(request(*history[user]), loads) == first[user]


def test_the_longest_prefix_wins():
    router = PrefixAffinity(BLOCK, 100)
    short, long = [1] * 9, [1] * 17
    assert router.choose(request(*short), {"a": 0, "b": 1}) == "a"
    router.caches["b"].add(prefixes_of(long))
    assert router.choose(request(*long, 2), {"a": 0, "b": 3}) == "b"
    assert router.choose(request(*short), {"a": 0, "b": 1}) == "a"  # both have as much of it


def test_prefixes_of_another_salt_are_others():
    ids = [1] * 9
    found = {
        salt: Router(BLOCK, 0).prefixes(Request("", None, ids, SamplingParams(cache_salt=salt)))
        for salt in (None, "a", "b")
    }
    assert len({prefix for prefixes in found.values() for prefix in prefixes}) == 6


def test_a_prefix_is_not_worth_every_queue():
    router = PrefixAffinity(BLOCK, 100)
    prompt = [1] * 30
    assert router.choose(request(*prompt), {"a": 0, "b": 1}) == "a"
    most = router.most_ahead
    assert router.choose(request(*prompt), {"a": most, "b": 0}) == "a"
    assert router.choose(request(*prompt), {"a": most + 1, "b": 0}) == "b"
    assert router.choose(request(*prompt), {"a": 0, "b": 0}) in "ab"  # now both have it
    assert router.choose(request(*prompt), {"a": 1, "b": 0}) == "b"


def test_the_second_longest_prefix_if_the_first_is_too_busy():
    router = PrefixAffinity(BLOCK, 100)
    caches = {name: PrefixCache(100) for name in "abc"}
    for name, length in (("a", 30), ("b", 20), ("c", 5)):
        caches[name].add(prefixes_of([1] * length))
    router.caches = caches
    most = router.most_ahead
    assert router.choose(request(*[1] * 32), {"a": most + 1, "b": most, "c": 0}) == "b"


def test_a_prefix_that_is_a_small_part_of_the_prompt_does_not_decide():
    """As the start of a chat template, which all prompts have. It only decides among the least loaded ones."""
    router = PrefixAffinity(BLOCK, 100)
    begin = [1] * 16
    assert router.choose(request(*begin, 0), {"a": 0, "b": 1}) == "a"
    for num_others, name in ((15, "a"), (17, "a"), (24, "b")):  # 4 of 7, 8 and 9 blocks
        router.caches = {"a": PrefixCache(100)}
        router.caches["a"].add(prefixes_of([*begin, 0]))
        prompt = [*begin, *range(10, 10 + num_others)]
        assert router.choose(request(*prompt), {"a": 0, "b": 0}) == "a"
        router.caches["a"] = PrefixCache(100)
        router.caches["a"].add(prefixes_of([*begin, 0]))
        assert router.choose(request(*prompt), {"a": 1, "b": 0}) == name


def test_replicas_come_and_go():
    router = PrefixAffinity(BLOCK, 100)
    prompt = [1] * 30
    assert router.choose(request(*prompt), {"a": 0}) == "a"
    assert router.choose(request(*prompt), {"b": 0, "c": 5}) == "b"  # a has died
    assert router.choose(request(*prompt), {"b": 1, "d": 0}) == "b"
    assert router.caches.keys() == {"b", "d"}


class RealCache:
    """What a replica does with prompts that come one after the other, without answers."""

    def __init__(self, num_blocks: int):
        self.manager = BlockManager(num_blocks, BLOCK)

    def num_found(self, token_ids: list[int]) -> int:
        return len(self.manager.find_prefix(request(*token_ids).sequences[0]))

    def add(self, token_ids: list[int]) -> None:
        manager = self.manager
        seq = request(*token_ids).sequences[0]
        manager.take_prefix(seq)
        manager.allocate(seq, seq.num_missing_tokens)
        manager.cache_full_blocks(seq, len(seq))
        manager.unwritten.clear()
        manager.free(seq)


LOADS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 30), min_size=1)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.lists(PROMPT, max_size=30))
def test_as_the_block_manager_finds_it(prompts):
    """With room for all, the router knows to the block what a replica has."""
    real, ours = RealCache(2000), PrefixCache(2000)
    for prompt in prompts:
        assert ours.num_found(prefixes_of(prompt)) == real.num_found(prompt)
        real.add(prompt)
        ours.add(prefixes_of([*prompt, 0]))  # with its last block, which is cached, too


@settings(max_examples=150, deadline=None)
@given(st.lists(PROMPT, max_size=30), st.integers(1, 12))
def test_what_is_left_after_evictions_is_a_prefix(prompts, num_blocks):
    """As in the block manager, the end of a prompt goes before its start, and never more stays than there is room."""
    cache = PrefixCache(num_blocks)
    for prompt in prompts:
        prefixes = prefixes_of(prompt)
        cache.add(prefixes)
        assert len(cache.prefixes) <= num_blocks
        assert cache.num_found(prefixes) == min(len(prefixes), num_blocks)
    for prompt in prompts:
        is_there = [prefix in cache.prefixes for prefix in prefixes_of(prompt)]
        assert is_there == sorted(is_there, reverse=True)


@pytest.mark.parametrize("cls", [RoundRobin, LeastLoaded, PrefixAffinity])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_replica_that_is_there(cls, data):
    router = cls(BLOCK, 10)
    for loads, prompt in data.draw(st.lists(st.tuples(LOADS, PROMPT), max_size=8)):
        assert router.choose(request(*prompt), loads) in loads
