from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """So far: four draft tokens for all, in each step."""

    def num_draft_tokens(self, request):
        # TODO: this is asked before each step, for each request that gets a token in it.
        # `request.num_output_tokens` says how many it has. A step without accepted draft tokens brings
        # one.
        # TODO: who should get more than four, and who none? May that change in an answer?
        return super().num_draft_tokens(request)
