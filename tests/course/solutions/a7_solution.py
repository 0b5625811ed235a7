from weakref import WeakKeyDictionary

from nanovllm.scheduler import Scheduler

HOPELESS = 0.9  # seconds without a first token: it will not come in time
PATIENCE = 11.0  # seconds: then even a hopeless one comes first
FREE_TOKENS = 192  # of prompts per step: fewer than are computed while weights are read


class MyScheduler(Scheduler):
    """The cheapest first that can be in time, then those that cannot; whoever has waited for
    `PATIENCE`, before all."""

    def __init__(self, *args):
        super().__init__(*args)
        self.costs = WeakKeyDictionary()  # of each request

    def add(self, request):
        """What it costs: prompt tokens that the cache does not have, and its time in a seat."""
        super().add(request)
        seq, manager = request.sequences[0], self.block_manager
        num_missing = len(seq) - manager.block_size * len(manager.find_prefix(seq))
        self.costs[request] = num_missing + 20 * request.params.extra_args["predicted_tokens"]

    def priority(self, request):
        waited = self.clock() - request.arrival_time
        if request.num_output_tokens == 0 and waited > PATIENCE:
            return 0, request.arrival
        if request.num_output_tokens == 0 and waited > HOPELESS:
            return 2, request.arrival
        return 1, self.costs[request]

    def running_order(self, request):
        return request.is_prefilling, self.priority(request)

    def step_budget(self):
        return self.max_num_batched_tokens, FREE_TOKENS
