"""Your answers to the exercises of chapter 16. To check them: python -m tutorials.check 16"""

from collections import Counter
from typing import ClassVar

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


# --- 16.1 ---
class WholePrompts(Scheduler):
    """A prompt that fits into a step is computed in a single step."""

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        """See `schedule.tokens_left`, `schedule.prompt_tokens_left`, `request.prompt_token_ids`."""
        raise NotImplementedError


# --- 16.2 ---
def tenant(request: Request) -> str:
    return request.params.extra_args["tenant"]


class Weighted(Scheduler):
    """Seats in proportion to weights, among the tenants that want more."""

    weights: ClassVar = {"gold": 3, "free": 1}

    def next_waiting(self) -> Request | None:
        """One of `self.waiting`, or None if there is none. `Counter` may help."""
        raise NotImplementedError


# --- 16.3 ---
def is_urgent(request: Request) -> bool:
    return request.params.extra_args["urgent"]


class KeepsOneFree(Scheduler):
    """Urgent requests first, and a seat stays free for the next one."""

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        """See `self.running`, `self.max_num_seqs`. You need two more methods."""
        raise NotImplementedError
