from collections import Counter

from nanovllm.scheduler import Scheduler


def tenant_of(request):
    return request.params.extra_args["tenant"]


class MyScheduler(Scheduler):
    """The same service for all tenants. So far: first come, first served."""

    def __init__(self, *args):
        super().__init__(*args)
        self.served = Counter()  # the virtual token counter of each tenant

    def next_waiting(self):
        # TODO: whose turn is it?
        return super().next_waiting()

    def update(self, schedule, *args):
        # TODO: count what each tenant has received. schedule.sampled has the sequences that get a
        # token in this step.
        super().update(schedule, *args)

    # TODO: a tenant that had nothing to do for a while must not catch up. `add` is called when a
    # request comes.
