"""What was tried for assignment 3, beside its solution."""

from collections import Counter

from nanovllm.scheduler import Scheduler


def tenant_of(request):
    return request.params.extra_args["tenant"]


class Turns(Scheduler):
    """turns by requests"""

    def __init__(self, *args):
        super().__init__(*args)
        self.served = Counter()  # of each tenant

    def next_waiting(self):
        return min(self.waiting, key=lambda r: (self.served[tenant_of(r)], r.arrival), default=None)

    def admit(self, request):
        super().admit(request)
        self.served[tenant_of(request)] += 1


class FewestRunning(Scheduler):
    """fewest running requests first"""

    def next_waiting(self):
        running = Counter(map(tenant_of, self.running))
        return min(self.waiting, key=lambda r: (running[tenant_of(r)], r.arrival), default=None)


class PromptsOnly(Turns):
    """counters of prompt tokens only"""

    prompt_weight, output_weight = 1, 0

    def admit(self, request):
        Scheduler.admit(self, request)

    def update(self, schedule, *args):
        for seq in schedule.sampled:
            is_first = seq.num_output_tokens == 0
            prompt = is_first * len(seq.request.prompt_token_ids)
            service = self.output_weight + self.prompt_weight * prompt
            self.served[tenant_of(seq.request)] += service
        super().update(schedule, *args)


class OutputsOnly(PromptsOnly):
    """counters of output tokens only"""

    prompt_weight, output_weight = 0, 2


class NeverLifted(PromptsOnly):
    """counters of both, never lifted"""

    prompt_weight, output_weight = 1, 2
