from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """Short prompts first, and no answer stands still. So far: first come, first served."""

    def priority(self, request):
        # TODO: the smallest key is admitted first.
        return super().priority(request)

    # TODO: what does a step do to those who are in the middle of their answers?
    # See step_budget and running_order.
