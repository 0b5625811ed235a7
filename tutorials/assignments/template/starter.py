from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """People first. So far: first come, first served."""

    def priority(self, request):
        # TODO: the smallest key is admitted first. Whether nobody waits for the answer is
        # request.params.extra_args["batch"], True or False.
        return super().priority(request)
