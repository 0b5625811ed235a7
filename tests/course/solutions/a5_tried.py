"""What was tried for assignment 5, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly


class AtOnce(Silly):
    """admits and preempts each one at once, as soon as the cache has its prefix"""

    def make_room(self, schedule):
        for request in [r for r in self.waiting if r.num_cached_tokens is None]:
            prefix = self.block_manager.find_prefix(request.sequences[0])
            if len(prefix) > 50 and self.block_manager.can_admit(request):
                self.admit(request)
                self.preempt(request)


class FirstTokens(Silly):
    """preempts who has a first token, as long as somebody has none"""

    def priority(self, request):
        return request.num_output_tokens > 0, request.arrival

    def make_room(self, schedule):
        num_new = sum(request.num_output_tokens == 0 for request in self.waiting)
        served = [request for request in self.running if request.num_output_tokens > 0]
        for request in served[:num_new]:
            self.preempt(request)


class MostHits(Scheduler):
    """most hits of all"""

    window = None

    def num_found(self, request):
        return len(self.block_manager.find_prefix(request.sequences[0]))

    def next_waiting(self):
        return max(self.waiting[: self.window], key=self.num_found, default=None)


class Of8(MostHits):
    """most hits of the 8 oldest"""

    window = 8


class Of32(MostHits):
    """most hits of the 32 oldest"""

    window = 32


class Of128(MostHits):
    """most hits of the 128 oldest"""

    window = 128


class Patience5(Of128):
    """the same, but who has waited 5 s comes first"""

    patience = 5

    def next_waiting(self):
        is_old = self.waiting and self.clock() - self.waiting[0].arrival_time > self.patience
        return self.waiting[0] if is_old else super().next_waiting()


class Patience10(Patience5):
    """the same, 10 s"""

    patience = 10


class OldestHit(MostHits):
    """the oldest one with a hit of more than 20 blocks"""

    def next_waiting(self):
        oldest = self.waiting[0] if self.waiting else None
        return next((r for r in self.waiting if self.num_found(r) > 20), oldest)


class ByTokens(Scheduler):
    """sorted by the first tokens of the prompt"""

    def priority(self, request):
        return request.prompt_token_ids[:300], request.arrival
