from collections import defaultdict
from functools import partial

from nanovllm.topics.routing.router import PrefixCache, Router

SECONDS_PER_TOKEN = 1 / 40_000  # of a prompt that is not in the cache
SECONDS_PER_REQUEST = 0.02  # what each one that has not ended adds to the wait, about


class MyRouter(Router):
    """To where the first token comes soonest, by what is to be computed before it."""

    def __init__(self, block_size, num_blocks):
        super().__init__(block_size, num_blocks)
        self.caches = defaultdict(partial(PrefixCache, num_blocks))  # of each replica
        self.free_at = defaultdict(float)  # when it has computed all prompts that were sent to it

    def choose(self, request, loads):
        prefixes = self.prefixes(request)
        computed_at = {}
        for name in loads:
            num_found = self.block_size * self.caches[name].num_found(prefixes)
            num_missing = len(request.prompt_token_ids) - num_found
            start = max(self.free_at[name], request.arrival_time)
            computed_at[name] = start + SECONDS_PER_TOKEN * num_missing

        def first_token_at(name):
            return computed_at[name] + SECONDS_PER_REQUEST * loads[name]

        chosen = min(self.in_turn(loads), key=first_token_at)
        self.caches[chosen].add(prefixes)
        self.free_at[chosen] = computed_at[chosen]
        return chosen
