from nanovllm.scheduler import Scheduler


def deadline(request):
    """When its last token must be there: in seconds, by the scheduler's clock."""
    return request.arrival_time + request.params.extra_args["deadline"]


def is_urgent(request):
    return request.params.extra_args["urgent"]


class MyScheduler(Scheduler):
    """Meets deadlines. The earliest first; last those that are lost. Urgent ones take the seats of
    patient ones."""

    def is_lost(self, request):
        num_left = request.params.extra_args["predicted_tokens"] - request.num_output_tokens
        return self.clock() + 0.007 * max(1, num_left) > deadline(request)  # a step takes 7 ms

    def priority(self, request):
        return self.is_lost(request), deadline(request)

    def make_room(self, schedule):
        num_urgent = sum(is_urgent(r) and not self.is_lost(r) for r in self.waiting)
        num_seqs = sum(request.most_sequences for request in self.running)
        patient = sorted((r for r in self.running if not is_urgent(r)), key=self.priority)
        for request in patient[::-1][: max(0, num_urgent + num_seqs - self.max_num_seqs)]:
            self.preempt(request)
