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


class TwoClasses(Silly):
    """two classes, below and above 150 tokens, FCFS in each"""

    limit = 150

    def priority(self, request):
        return request.params.extra_args["predicted_tokens"] > self.limit, request.arrival


class LowerClasses(TwoClasses):
    """two classes, below and above 60 tokens"""

    limit = 60


class MiddleClasses(TwoClasses):
    """two classes, below and above 100 tokens"""

    limit = 100


class ThreeClasses(Silly):
    """three classes, FCFS in each"""

    def priority(self, request):
        guess = request.params.extra_args["predicted_tokens"]
        return (guess > 60) + (guess > 200), request.arrival


class Noted(Silly):
    """shortest guess first, by powers of two"""

    def priority(self, request):
        return int(request.params.extra_args["predicted_tokens"]).bit_length(), request.arrival
