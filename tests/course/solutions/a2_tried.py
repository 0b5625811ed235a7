"""What was tried for assignment 2, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly


class BestSizeOfSteps(Silly):
    """at most 384 tokens per step"""

    def step_budget(self):
        return 384, 384


class LargerSteps(Silly):
    """at most 512 tokens per step"""

    def step_budget(self):
        return 512, 512


class Chunks(Scheduler):
    """at most 512 tokens of prompts per step"""

    def step_budget(self):
        return self.max_num_batched_tokens, 512


class ShortestPromptAndAnswersFirst(Scheduler):
    """shortest prompt first, answers before prompts"""

    def running_order(self, request):
        return request.is_prefilling, self.priority(request)

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival


class ShortestPromptInShortSteps(Scheduler):
    """shortest prompt first, at most 512 tokens per step"""

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival

    def step_budget(self):
        return 512, 512


class TooSmallChunks(ShortestPromptAndAnswersFirst):
    """the same, answers first, at most 128 tokens of prompts per step"""

    def step_budget(self):
        return self.max_num_batched_tokens, 128
