from nanovllm.scheduler import Scheduler


def deadline(request):
    """When its last token must be there: in seconds, by the scheduler's clock."""
    return request.arrival_time + request.params.extra_args["deadline"]


def is_urgent(request):
    return request.params.extra_args["urgent"]


class MyScheduler(Scheduler):
    """Meets deadlines. The earliest first; last those that are lost. Urgent ones take the seats of patient ones."""

    def is_lost(self, request):
        tokens_left = max(
            1, request.params.extra_args["predicted_tokens"] - request.num_output_tokens
        )
        return self.clock() + 0.009 * tokens_left > deadline(
            request
        )  # a step, so a token, takes about 9 ms

    def priority(self, request):
        return self.is_lost(request), deadline(request)

    def make_room(self, schedule):
        num_urgent = sum(
            is_urgent(request) and not self.is_lost(request) for request in self.waiting
        )
        num_lacking = (
            num_urgent - self.max_num_seqs + sum(request.num_seats for request in self.running)
        )
        patient = sorted(
            (request for request in self.running if not is_urgent(request)), key=self.priority
        )
        for request in patient[::-1][: max(0, num_lacking)]:
            self.preempt(request, schedule)
