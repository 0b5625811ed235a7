from weakref import WeakKeyDictionary

from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """Doubles a request's draft tokens after accepted ones, halves them after rejected ones."""

    def __init__(self, limits, block_manager):
        super().__init__(limits, block_manager)
        self.asked = WeakKeyDictionary()  # for a request: its tokens then, and its draft tokens

    def num_draft_tokens(self, request):
        num_tokens = request.num_output_tokens
        before, most = self.asked.get(request, (num_tokens - 3, 2))
        num_accepted = num_tokens - before - 1
        if most > 0:
            most = min(16, 2 * most) if 2 * num_accepted >= most else most // 2
        elif num_tokens % 8 == 0:  # perhaps it copies now
            most = 1
        self.asked[request] = num_tokens, most
        return most
