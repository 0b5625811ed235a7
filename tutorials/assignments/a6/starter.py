from nanovllm.scheduler import Scheduler


def deadline(request):
    """When its last token must be there: in seconds, by the scheduler's clock."""
    return request.arrival_time + request.params.extra_args["deadline"]


def is_urgent(request):
    return request.params.extra_args["urgent"]


class MyScheduler(Scheduler):
    """Meets deadlines. So far: first come, first served."""

    def priority(self, request):
        # TODO: who comes first? And who last, because it is lost anyway?
        return super().priority(request)

    def make_room(self, schedule):
        """TODO: preempt patient requests if urgent ones find no seat."""
