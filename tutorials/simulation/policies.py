"""Policies that the studies compare on many machines.

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


class UrgentPushesOut(EarliestDeadline):
    """Preempts the last running request, if a waiting one stands before it."""

    def make_room(self, schedule: Schedule) -> None:
        if self.waiting and len(self.running) == self.max_num_seqs:
            urgent = min(self.waiting, key=self.priority)
            last = max(self.running, key=self.priority)
            if self.priority(urgent) < self.priority(last):
                self.preempt(last)


class NoWatermark(Scheduler):
    watermark = 0.0


class HighWatermark(Scheduler):
    watermark = 0.2


class MostBlocks(Scheduler):
    def victim(self, candidates: list[Request]) -> Request:
        return max(candidates, key=lambda request: len(request.sequences[0].block_table))


# --- what a step computes ---


class PromptBound(Scheduler):
    bound = 256

    def step_budget(self) -> tuple[int, int]:
        return self.max_num_batched_tokens, self.bound


class PromptsFirst(Scheduler):
    def running_order(self, request: Request) -> tuple:
        return not request.is_prefilling, self.priority(request)


class ShortestDecodesFirst(ShortestFirst):
    def running_order(self, request: Request) -> tuple:
        return request.is_prefilling, self.priority(request)
