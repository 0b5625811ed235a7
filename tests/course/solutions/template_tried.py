"""What was tried for assignment template, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly


def is_batch(request):
    return request.params.extra_args["batch"]


class BatchFirst(Silly):
    """the batch job first"""

    def priority(self, request):
        return not is_batch(request), request.arrival


class HalfOfTheSeats(Scheduler):
    """at most 4 seats for the batch job"""

    def next_waiting(self):
        is_full = sum(map(is_batch, self.running)) >= 4
        return next((r for r in self.waiting if not (is_full and is_batch(r))), None)


class OnlyAlone(Scheduler):
    """the batch job only while no people are there"""

    def priority(self, request):
        return is_batch(request), request.arrival

    def may_admit(self, request, schedule):
        return not is_batch(request) or all(map(is_batch, self.running))
