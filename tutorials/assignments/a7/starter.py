from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """As many as possible within the SLO. So far: first come, first served."""

    def priority(self, request):
        # TODO: whom to admit first if not all can be served in time? And what about those who are
        # late already?
        return super().priority(request)

    def step_budget(self):
        # TODO: how many prompt tokens can a step compute before those who decode have to wait?
        return super().step_budget()
