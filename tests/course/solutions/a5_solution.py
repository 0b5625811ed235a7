from nanovllm.scheduler import Scheduler

WINDOW = 128  # requests that are looked up: that takes time
BLOCKS_PER_SECOND = 25  # what a second of waiting is worth


class MyScheduler(Scheduler):
    """Who finds most in the prefix cache comes first, of the oldest ones. Who has waited long needs
    to find less."""

    def score(self, request):
        num_found = len(self.block_manager.find_prefix(request.sequences[0]))
        return num_found + BLOCKS_PER_SECOND * (self.clock() - request.arrival_time)

    def next_waiting(self):
        return max(self.waiting[:WINDOW], key=self.score, default=None)
