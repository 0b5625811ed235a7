"""What was tried for assignment 7, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import LastFirst, ShortestPrompt, Silly

FREE_TOKENS = 288  # of prompts per step
HOPELESS = 1.0  # seconds without a first token
PATIENCE = 12.0  # seconds without a first token: no request waits much longer


class FewPromptTokens(Scheduler):
    """at most 288 prompt tokens per step"""

    def step_budget(self):
        return self.max_num_batched_tokens, min(FREE_TOKENS, self.max_num_batched_tokens)


class ShortestGuess(Silly):
    """shortest guess first"""

    def priority(self, request):
        return request.params.extra_args["predicted_tokens"]


class LastFirstFewTokens(FewPromptTokens, LastFirst):
    """last first, at most 288 prompt tokens"""


class ShortestPromptFewTokens(FewPromptTokens, ShortestPrompt):
    """shortest prompt first, at most 288 prompt tokens"""


class ShortestGuessFewTokens(FewPromptTokens, ShortestGuess):
    """shortest guess first, at most 288 prompt tokens"""


class OneTenantFirst(FewPromptTokens, Silly):
    """tenant B first, at most 288 prompt tokens"""

    def priority(self, request):
        return request.params.extra_args["tenant"] != "B", request.arrival


class LostLast(Scheduler):
    """FCFS, but lost ones last"""

    def priority(self, request):
        waited = self.clock() - request.arrival_time
        return request.num_output_tokens == 0 and waited > HOPELESS, request.arrival


class LostLastFewTokens(FewPromptTokens, LostLast):
    """the same with decodes first and at most 288 prompt tokens"""

    def running_order(self, request):
        return request.is_prefilling, self.priority(request)


class LostLastWithPatience(LostLastFewTokens):
    """the same, and before all who has waited for 12 s"""

    def priority(self, request):
        waited = self.clock() - request.arrival_time
        is_old = request.num_output_tokens == 0 and waited > PATIENCE
        return not is_old, super().priority(request)
