"""Policies that are compared: on the real engine (cases, pairs) and on other machines (studies).

Each differs from first come, first served in a method or two. Chapter 16 explains them.
"""

from collections import Counter

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

# --- order of admission ---


class LastFirst(Scheduler):
    def priority(self, request: Request) -> int:
        return -request.arrival


class ShortestFirst(Scheduler):
    """By a guess of the answer's length."""

    def priority(self, request: Request) -> tuple:
        return request.params.extra_args["predicted_tokens"], request.arrival


class WithALimit(ShortestFirst):
    """A request that has waited for a second goes first."""

    def priority(self, request: Request) -> tuple:
        is_new = self.clock() - request.arrival_time < 1
        return is_new, *super().priority(request)


class ShortestPrompt(Scheduler):
    def priority(self, request: Request) -> tuple[int, int]:
        return len(request.prompt_token_ids), request.arrival


class EarliestDeadline(Scheduler):
    def priority(self, request: Request) -> tuple[float, int]:
        return request.arrival_time + request.params.extra_args["deadline"], request.arrival


class FairByTenant(Scheduler):
    """Admits a request of the tenant that has the fewest running."""

    def next_waiting(self) -> Request | None:
        running = Counter(request.params.extra_args["tenant"] for request in self.running)
        return min(
            self.waiting,
            key=lambda r: (running[r.params.extra_args["tenant"]], r.arrival),
            default=None,
        )


class LongestPrefix(Scheduler):
    """Admits what is in the cache already."""

    def next_waiting(self) -> Request | None:
        find = self.block_manager.find_prefix
        return max(self.waiting, key=lambda r: len(find(r.sequences[0])), default=None)


class LeastServed(Scheduler):
    watermark = 0.0

    def priority(self, request: Request) -> tuple[int, int]:
        return request.num_output_tokens, request.arrival


# --- preemption ---


def push_out(scheduler: Scheduler) -> None:
    """Preempts the last running request, if a waiting one stands before it."""
    if scheduler.waiting and len(scheduler.running) == scheduler.max_num_seqs:
        urgent = min(scheduler.waiting, key=scheduler.priority)
        last = max(scheduler.running, key=scheduler.priority)
        if scheduler.priority(urgent) < scheduler.priority(last):
            scheduler.preempt(last)


class ShortPushesOut(ShortestFirst):
    def make_room(self, schedule: Schedule) -> None:
        push_out(self)


class UrgentPushesOut(EarliestDeadline):
    def make_room(self, schedule: Schedule) -> None:
        push_out(self)


class NoWatermark(Scheduler):
    watermark = 0.0


class HighWatermark(Scheduler):
    watermark = 0.2


class MostBlocks(Scheduler):
    def victim(self, candidates: list[Request]) -> Request:
        return max(candidates, key=lambda request: len(request.sequences[0].block_table))


class Oldest(Scheduler):
    def victim(self, candidates: list[Request]) -> Request:
        return candidates[0]


# --- what a step computes ---


class PromptBound(Scheduler):
    bound = 256

    def step_budget(self) -> tuple[int, int]:
        return self.max_num_batched_tokens, self.bound


class SmallPromptBound(PromptBound):
    bound = 64


class PromptsFirst(Scheduler):
    def running_order(self, request: Request) -> tuple:
        return not request.is_prefilling, self.priority(request)


class ShortestDecodesFirst(ShortestFirst):
    def running_order(self, request: Request) -> tuple:
        return request.is_prefilling, self.priority(request)


class OnePrompt(Scheduler):
    """Admits nothing while a prompt is being computed."""

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        return not any(one.is_prefilling for one in self.running)


class WholePrompts(Scheduler):
    """Admits only what the step can compute as a whole."""

    def may_admit(self, request: Request, schedule: Schedule) -> bool:
        return len(request.sequences[0]) <= schedule.tokens_left or not self.running
