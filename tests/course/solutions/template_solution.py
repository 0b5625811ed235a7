from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """People first."""

    def priority(self, request):
        return request.params.extra_args["batch"], request.arrival
