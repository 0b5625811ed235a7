"""Your answers to the exercises of chapter 03. To check them: python -m tutorials.check 03"""

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler


# --- 03.1 ---
def predict() -> dict[str, list[str]]:
    """The cells of A and of B, step by step, such as {"A": ["4", ...], "B": [...]}."""
    raise NotImplementedError


# --- 03.2 ---
class Aging(Scheduler):
    """Shortest first, but a request gets better while it waits."""

    def priority(self, request):
        """The smallest is admitted first. See `request.params.max_tokens`, `request.arrival`."""
        raise NotImplementedError


# --- 03.3 ---
class Rule(Scheduler):
    """First come, first served, as long as there is memory."""

    def schedule(self) -> Schedule:
        schedule = Schedule(self.max_num_batched_tokens, self.max_num_batched_tokens)
        raise NotImplementedError
        return schedule
