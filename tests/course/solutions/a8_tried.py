"""What was tried for assignment 8, beside its solution."""

from nanovllm.router import LeastLoaded, PrefixAffinity, PrefixCache
from tutorials.assignments.silly import SillyRouter


class ByUser(SillyRouter):
    """by the user alone"""

    def choose(self, request, loads):
        return [*loads][request.params.extra_args["user"] % len(loads)]


class ByLongBegin(SillyRouter):
    """by the prompt's first 1,024 tokens"""

    def choose(self, request, loads):
        begin = tuple(request.prompt_token_ids[:1024])
        return [*loads][hash(begin) % len(loads)]


class Fewest(LeastLoaded, SillyRouter):
    """LeastLoaded"""


class AsItIs(PrefixAffinity):
    """PrefixAffinity, as it is: at most 8 ahead"""


class NoBound(PrefixAffinity):
    """PrefixAffinity without a bound"""

    most_ahead = 10**9


class ThreeAhead(PrefixAffinity):
    """PrefixAffinity, at most 3 ahead"""

    most_ahead = 3


class OneAhead(PrefixAffinity):
    """PrefixAffinity, at most 1 ahead"""

    most_ahead = 1


class LeastWork(LeastLoaded):
    """fewest tokens to compute again, and 500 for each request that is there"""

    tokens_per_request = 500

    def __init__(self, block_size, num_blocks):
        super().__init__(block_size, num_blocks)
        self.caches = {}

    def choose(self, request, loads):
        token_ids, size = request.prompt_token_ids, self.block_size
        blocks = [tuple(token_ids[i : i + size]) for i in range(0, len(token_ids) - size, size)]

        def work(name):
            cache = self.caches.setdefault(name, PrefixCache(self.num_blocks))
            num_missing = len(token_ids) - size * cache.num_found(blocks)
            return num_missing + self.tokens_per_request * loads[name]

        chosen = min(self.in_turn(loads), key=work)
        self.caches[chosen].add(blocks)
        return chosen


class LeastWork1000(LeastWork):
    """the same, 1,000 for each"""

    tokens_per_request = 1000
