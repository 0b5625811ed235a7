from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """Preempts as cheaply as it can, and as seldom. So far: first come, first served."""

    watermark = 0.05  # TODO: the part of the blocks that admission leaves free

    def victim(self, candidates):
        # TODO: who loses its blocks?
        return super().victim(candidates)

    def should_swap(self, request):
        # TODO: to the host, or computed again?
        return super().should_swap(request)
