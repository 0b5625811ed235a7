"""What was tried for assignment 9, beside its solution."""

from collections import defaultdict

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly


class NoDraftTokens(Silly):
    """no draft tokens"""

    def num_draft_tokens(self, request):
        return 0


class Eight(Silly):
    """eight for all"""

    def num_draft_tokens(self, request):
        return 8


class ByTurns(Silly):
    """four for every second request"""

    def num_draft_tokens(self, request):
        return 4 * (request.arrival % 2)


class ForLongPrompts(Silly):
    """eight for prompts of more than 300 tokens"""

    def num_draft_tokens(self, request):
        return 8 if len(request.prompt_token_ids) > 300 else 0


class One(Scheduler):
    """one for all"""

    def num_draft_tokens(self, request):
        return 1


class Two(Scheduler):
    """two for all"""

    def num_draft_tokens(self, request):
        return 2


class WhileFewRun(Scheduler):
    """four while at most 64 run"""

    most_running = 64

    def num_draft_tokens(self, request):
        return 4 if len(self.running) <= self.most_running else 0


class WhileMoreRun(WhileFewRun):
    """four while at most 128 run"""

    most_running = 128


class Shared(Scheduler):
    """as many for each as there is room in 256 tokens"""

    def num_draft_tokens(self, request):
        return max(0, min(8, 256 // len(self.running) - 1))


class GivesUp(Scheduler):
    """four, until six steps in a row brought nothing"""

    def __init__(self, limits, block_manager):
        super().__init__(limits, block_manager)
        self.before = {}
        self.num_bad = defaultdict(int)

    def num_draft_tokens(self, request):
        num_tokens = request.num_output_tokens
        is_better = num_tokens > self.before.get(request, 0) + 1
        self.before[request] = num_tokens
        self.num_bad[request] = 0 if is_better else self.num_bad[request] + 1
        return 4 if self.num_bad[request] <= 6 else 0


class TriesAgain(GivesUp):
    """the same, and four again for every eighth token"""

    def num_draft_tokens(self, request):
        return super().num_draft_tokens(request) or 4 * (request.num_output_tokens % 8 == 0)
