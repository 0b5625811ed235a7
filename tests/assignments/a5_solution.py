from nanovllm.scheduler import Scheduler

WINDOW = 64  # requests that are looked up: that takes time
TOKENS_PER_SECOND = 200  # what a second of waiting is worth


class MyScheduler(Scheduler):
    """Who finds most in the prefix cache comes first, of the oldest ones. Who has waited long needs to find less."""

    def score(self, request):
        found = self.block_manager.find_prefix(request.sequences[0])
        waited = self.clock() - request.arrival_time
        return self.block_manager.block_size * len(found) + TOKENS_PER_SECOND * waited

    def next_waiting(self):
        return max(self.waiting[:WINDOW], key=self.score, default=None)
