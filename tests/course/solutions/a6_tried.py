"""What was tried for assignment 6, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly

STEP = 0.007  # seconds


def deadline(request):
    return request.arrival_time + request.params.extra_args["deadline"]


def is_urgent(request):
    return request.params.extra_args["urgent"]


def guess(request):
    return request.params.extra_args["predicted_tokens"]


class ShortestGuess(Silly):
    """shortest guess first"""

    def priority(self, request):
        return guess(request)


class ShortestRemaining(Silly):
    """shortest rest first, and it pushes out"""

    def priority(self, request):
        return guess(request) - request.num_output_tokens

    def make_room(self, schedule):
        """The best of all, in as many seats as there are."""
        everybody = sorted([*self.running, *self.waiting], key=self.priority)
        for request in everybody[self.max_num_seqs :]:
            if request in self.running:
                self.preempt(request)


class EDF(Scheduler):
    """EDF"""

    def is_lost(self, request):
        return False

    def priority(self, request):
        return self.is_lost(request), deadline(request)


class UrgentPush(EDF):
    """urgent ones first, and they push out"""

    def priority(self, request):
        return not is_urgent(request), request.arrival

    def make_room(self, schedule):
        num_urgent = sum(is_urgent(r) and not self.is_lost(r) for r in self.waiting)
        patient = sorted((r for r in self.running if not is_urgent(r)), key=self.priority)
        num_missing = num_urgent + len(self.running) - self.max_num_seqs
        for request in patient[::-1][: max(0, num_missing)]:
            self.preempt(request)


class LostLast(EDF):
    """EDF, lost ones last"""

    def is_lost(self, request):
        num_left = max(1, guess(request) - request.num_output_tokens)
        return self.clock() + STEP * num_left > deadline(request)


class Passed(EDF):
    """EDF, lost ones last, pushes out; "lost" if the deadline has passed"""

    def is_lost(self, request):
        return self.clock() > deadline(request)

    make_room = UrgentPush.make_room
