"""What was tried for assignment 1, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly


class ShortestGuess(Silly):
    """shortest guess first"""

    def priority(self, request):
        return request.params.extra_args["predicted_tokens"]


class SlowlyAgeing(Scheduler):
    """shortest guess first, minus 50 tokens for each second of waiting"""

    def priority(self, request):
        waited = self.clock() - request.arrival_time
        return request.params.extra_args["predicted_tokens"] - 50 * waited


class TwoClasses(Scheduler):
    """two classes, below and above 150 tokens, FCFS in each"""

    def priority(self, request):
        return request.params.extra_args["predicted_tokens"] > 150, request.arrival
