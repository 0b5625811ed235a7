from collections import Counter

from nanovllm.scheduler import Scheduler


def tenant_of(request):
    return request.params.extra_args["tenant"]


class MyScheduler(Scheduler):
    """The same service for all tenants: the one that has received least is next."""

    def __init__(self, *args):
        super().__init__(*args)
        self.served = Counter()  # the virtual token counter of each tenant

    def next_waiting(self):
        return min(self.waiting, key=lambda r: (self.served[tenant_of(r)], r.arrival), default=None)

    def update(self, schedule, *args):
        for seq in schedule.sampled:
            is_first = seq.num_output_tokens == 0
            self.served[tenant_of(seq.request)] += 2 + is_first * len(seq.request.prompt_token_ids)
        super().update(schedule, *args)

    def add(self, request):
        active, tenant = {tenant_of(other) for other in self.unfinished()}, tenant_of(request)
        if active and tenant not in active:  # what it did not ask for is lost
            self.served[tenant] = max(self.served[tenant], min(self.served[t] for t in active))
        super().add(request)
