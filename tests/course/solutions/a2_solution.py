from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """Short prompts first, and no answer stands still."""

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival

    def running_order(self, request):
        return request.is_prefilling, self.priority(request)  # answers before any prompt

    def step_budget(self):
        return self.max_num_batched_tokens, 896  # tokens of prompts beside the answers
