from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """Short answers first, but nobody waits forever. So far: first come, first served."""

    def priority(self, request):
        # TODO: the smallest key is admitted first. The guessed length of the answer, in tokens, is
        # request.params.extra_args["predicted_tokens"].
        # TODO: whoever has waited long must come first, too.
        return super().priority(request)
