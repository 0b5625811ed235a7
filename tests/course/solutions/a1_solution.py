from nanovllm.scheduler import Scheduler

PATIENCE = 8.5  # seconds


class MyScheduler(Scheduler):
    """Short answers first. Whoever has waited for `PATIENCE` comes before all, the oldest first."""

    def priority(self, request):
        if self.clock() - request.arrival_time > PATIENCE:
            return 0, request.arrival
        return 1, request.params.extra_args["predicted_tokens"]
