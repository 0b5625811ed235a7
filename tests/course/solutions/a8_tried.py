"""What was tried for assignment 8, beside its solution."""

from nanovllm.topics.routing.router import LeastLoaded, PrefixAffinity, PrefixCache
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
    """PrefixAffinity, as it is: half of the prompt, at most 8 ahead"""


class AnyShare(PrefixAffinity):
    """PrefixAffinity, any part of the prompt, at most 8 ahead"""

    least_share = 0


class NoBound(PrefixAffinity):
    """PrefixAffinity, any part of the prompt, without a bound"""

    least_share = 0
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
        prefixes = self.prefixes(request)

        def work(name):
            cache = self.caches.setdefault(name, PrefixCache(self.num_blocks))
            num_missing = len(request.prompt_token_ids) - self.block_size * cache.num_found(
                prefixes
            )
            return num_missing + self.tokens_per_request * loads[name]

        chosen = min(self.in_turn(loads), key=work)
        self.caches[chosen].add(prefixes)
        return chosen


class LeastWork1000(LeastWork):
    """the same, 1,000 for each"""

    tokens_per_request = 1000
