from nanovllm.scheduler import Scheduler


def deadline(request):
    """When its last token must be there: in seconds, by the scheduler's clock."""
    return request.arrival_time + request.params.extra_args["deadline"]


def is_urgent(request):
    return request.params.extra_args["urgent"]


class MyScheduler(Scheduler):
    """Meets deadlines. The earliest first; last those that are lost. Urgent ones take the seats of patient ones."""

    def is_lost(self, request):
        predicted = request.params.extra_args["predicted_tokens"]
        tokens_left = max(1, predicted - request.num_output_tokens)
        return self.clock() + 0.009 * tokens_left > deadline(request)  # a token takes about 9 ms

    def priority(self, request):
        return self.is_lost(request), deadline(request)

    def make_room(self, schedule):
        urgent = [r for r in self.waiting if is_urgent(r) and not self.is_lost(r)]
        seats_taken = sum(request.num_seats for request in self.running)
        num_lacking = len(urgent) + seats_taken - self.max_num_seqs
        patient = [request for request in self.running if not is_urgent(request)]
        patient.sort(key=self.priority)
        for request in patient[::-1][: max(0, num_lacking)]:
            self.preempt(request, schedule)
