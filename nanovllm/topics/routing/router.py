"""Router: which of several replicas serves a request. Imports no torch.

A router knows what it has sent where, and what has ended. It does not ask the replicas: asking
would take more time than a better choice saves.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from nanovllm.sequence import Request

MOST_REPLICAS = 4096
Replica = Any  # its name
Loads = Mapping[Replica, int]
"""How many requests of each replica have not ended. The replicas may change at any time."""


class Router:
    """Base of all. Each replica has `num_blocks` KV blocks of `block_size` tokens."""

    def __init__(self, block_size: int, num_blocks: int):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_turns = 0

    def choose(self, request: Request, loads: Loads) -> Replica:
        """Called once for each request. Returns the replica that serves the request."""
        raise NotImplementedError

    def prefixes(self, request: Request) -> list[int]:
        """The prefixes of the prompt that end with a block, the shortest first: their hashes. The
        last token is in none of them, because it is always computed."""
        token_ids = request.prompt_token_ids
        found = []
        prefix = request.root_prefix_id
        for end in range(self.block_size, len(token_ids), self.block_size):
            prefix = hash((prefix, *token_ids[end - self.block_size : end]))
            found.append(prefix)
        return found

    def in_turn(self, loads: Loads) -> list[Replica]:
        """All replicas; each time another one is the first."""
        self.num_turns += 1
        first = self.num_turns % len(loads)
        replicas = [*loads]
        return replicas[first:] + replicas[:first]


class RoundRobin(Router):
    """Takes the replicas in turn."""

    def choose(self, request: Request, loads: Loads) -> Replica:
        return self.in_turn(loads)[0]


class LeastLoaded(Router):
    """Chooses the replica with the fewest requests."""

    def choose(self, request: Request, loads: Loads) -> Replica:
        return min(self.in_turn(loads), key=loads.__getitem__)


class PrefixAffinity(LeastLoaded):
    """Chooses the replica that holds the longest prefix of the prompt. If that is `least_share` of
    the prompt, it may have `most_ahead` requests more than the least loaded one, else no more."""

    least_share = 0.5
    most_ahead = 8

    def __init__(self, block_size: int, num_blocks: int):
        super().__init__(block_size, num_blocks)
        self.caches: dict[Replica, PrefixCache] = {}

    def choose(self, request: Request, loads: Loads) -> Replica:
        self.remember(loads)
        prefixes = self.prefixes(request)
        least = super().choose(request, loads)
        found = {name: self.caches[name].num_found(prefixes) for name in loads}
        enough = self.least_share * len(prefixes)
        holders = [name for name in loads if found[name] >= enough]
        most = loads[least] + self.most_ahead
        near = [name for name in holders if loads[name] <= most]
        idlest = [name for name in loads if loads[name] == loads[least]]
        allowed = [least, *idlest, *near]
        chosen = max(allowed, key=lambda name: (found[name], -loads[name]))
        self.caches[chosen].add(prefixes)
        return chosen

    def remember(self, loads: Loads) -> None:
        """Keeps the caches of the replicas that are there."""
        caches = self.caches
        self.caches = {name: caches.get(name) or PrefixCache(self.num_blocks) for name in loads}


class PrefixCache:
    """What a replica's block manager holds, as far as prompts say it. Those that were sent longest
    ago are evicted first, the end of a prompt before its start."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.prefixes: OrderedDict[int, None] = OrderedDict()

    def num_found(self, prefixes: list[int]) -> int:
        """How many of a prompt's prefixes are there: if one is, all shorter ones are, too."""
        return bisect_left(prefixes, True, key=lambda prefix: prefix not in self.prefixes)

    def add(self, prefixes: list[int]) -> None:
        for prefix in reversed(prefixes):
            self.prefixes[prefix] = None
            self.prefixes.move_to_end(prefix)
        while len(self.prefixes) > self.num_blocks:
            self.prefixes.popitem(last=False)
