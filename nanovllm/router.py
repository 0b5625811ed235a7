"""Router: which of several replicas serves a request. Imports no torch.

A router knows what it has sent where, and what has ended. It does not ask the replicas: asking
would take more time than a better choice saves.
"""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Any

from nanovllm.block_manager import EMPTY_PREFIX
from nanovllm.sequence import Request

MOST_REPLICAS = 4096
Replica = Any  # its name
Loads = Mapping[Replica, int]
"""How many requests of each replica have not ended. The replicas may change at any time."""
Key = tuple[int, tuple[int, ...]]


class Router:
    """Base of all. Each replica has `num_blocks` KV blocks of `block_size` tokens."""

    def __init__(self, block_size: int, num_blocks: int):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_turns = 0

    def choose(self, request: Request, loads: Loads) -> Replica:
        """Is called once for each request, which then goes to the replica that it returns."""
        raise NotImplementedError

    def in_turn(self, loads: Loads) -> list[Replica]:
        """All replicas; each time another one is the first."""
        self.num_turns += 1
        first = self.num_turns % len(loads)
        replicas = [*loads]
        return replicas[first:] + replicas[:first]


class RoundRobin(Router):
    """One after the other."""

    def choose(self, request: Request, loads: Loads) -> Replica:
        return self.in_turn(loads)[0]


class LeastLoaded(Router):
    """Chooses the replica with the fewest requests."""

    def choose(self, request: Request, loads: Loads) -> Replica:
        return min(self.in_turn(loads), key=loads.__getitem__)


class PrefixAffinity(LeastLoaded):
    """Chooses the replica that holds the longest prefix of the prompt, unless it has more than
    `most_ahead` requests more than the least loaded one."""

    most_ahead = 8

    def __init__(self, block_size: int, num_blocks: int):
        super().__init__(block_size, num_blocks)
        self.caches: dict[Replica, PrefixCache] = {}

    def choose(self, request: Request, loads: Loads) -> Replica:
        old = self.caches
        self.caches = {name: old.get(name) or PrefixCache(self.num_blocks) for name in loads}
        token_ids = request.prompt_token_ids
        ends = range(self.block_size, len(token_ids), self.block_size)
        blocks = [tuple(token_ids[end - self.block_size : end]) for end in ends]

        least = super().choose(request, loads)
        allowed = [name for name in loads if loads[name] <= loads[least] + self.most_ahead]
        found = {name: self.caches[name].num_found(blocks) for name in allowed}
        chosen = max([least, *allowed], key=lambda name: (found[name], -loads[name]))
        self.caches[chosen].add(blocks)
        return chosen


class PrefixCache:
    """What a replica's block manager holds, by the same keys, as far as prompts say it. Those that
    were sent longest ago are evicted first, the end of a prompt before its begin."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.prefix_ids: OrderedDict[Key, int] = OrderedDict()
        self.new_ids = count(EMPTY_PREFIX + 1)

    def num_found(self, blocks: list[tuple[int, ...]]) -> int:
        """How many blocks at the begin of a prompt are there."""
        prefix_id = EMPTY_PREFIX
        for num_before, tokens in enumerate(blocks):
            found = self.prefix_ids.get((prefix_id, tokens))
            if found is None:
                return num_before
            prefix_id = found
        return len(blocks)

    def add(self, blocks: list[tuple[int, ...]]) -> None:
        keys = []
        prefix_id = EMPTY_PREFIX
        for tokens in blocks:
            key = (prefix_id, tokens)
            prefix_id = self.prefix_ids.setdefault(key, next(self.new_ids))
            keys.append(key)
        for key in reversed(keys):
            self.prefix_ids.move_to_end(key)
        while len(self.prefix_ids) > self.num_blocks:
            self.prefix_ids.popitem(last=False)
