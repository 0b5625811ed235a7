"""Repairs of assignment 0 that are not right, each of one class: none gets all points of its part."""

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler


class ShortFirst(Scheduler):
    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival


class Remembers(ShortFirst):
    def __init__(self, *args):
        super().__init__(*args)
        self.preempted = []

    def preempt(self, request):
        super().preempt(request)
        self.preempted.append(request)


class ForgetsThePreempted(ShortFirst):
    """short prompts first, and nothing else"""

    part = "A"


class LastPreemptedFirst(Remembers):
    """the last one who was preempted comes back first"""

    part = "A"

    def next_waiting(self):
        back = [request for request in self.preempted if request in self.waiting]
        return back[-1] if back else super().next_waiting()


class ShortestPreemptedFirst(ShortFirst):
    """who was preempted comes back before all others, but in the order of the prompts"""

    part = "A"

    def priority(self, request):
        return request.num_output_tokens == 0, super().priority(request)


class OneChance(Remembers):
    """who was preempted is first in line, but only once: it may not fit"""

    part = "A"

    def next_waiting(self):
        return self.preempted.pop(0) if self.preempted else super().next_waiting()


class HidesTheLost(Remembers):
    """the starter, but whoever asks gets to see those who are lost"""

    part = "A"

    def preempt(self, request):
        super().preempt(request)
        self.waiting.remove(request)

    def next_waiting(self):
        if self.preempted:
            self.waiting.append(self.preempted.pop(0))
            return self.waiting[-1]
        return super().next_waiting()

    def unfinished(self):
        return super().unfinished() + self.preempted


class CatchesTheError(Remembers):
    """the starter, but an error in `next_waiting` is caught"""

    part = "A"

    def preempt(self, request):
        super().preempt(request)
        self.waiting.remove(request)

    def next_waiting(self):
        try:
            self.waiting.append(self.preempted.pop(0))
            return self.waiting[-1]
        except IndexError:
            return super().next_waiting()


class FirstComeFirstServed(Remembers):
    """who was preempted comes back first, but short prompts do not"""

    part = "A"

    def priority(self, request):
        return request.arrival

    def next_waiting(self):
        back = [request for request in self.preempted if request in self.waiting]
        return back[0] if back else super().next_waiting()


class CountsNothing(BlockManager):
    """has no `num_freed`"""

    part = "B"


class CountsZero(BlockManager):
    """`num_freed` is always 0"""

    part = "B"
    num_freed = 0


class CountsAll(BlockManager):
    """counts also the blocks that others still read"""

    part = "B"
    num_freed = 0

    def free(self, seq):
        self.num_freed += len(seq.block_table)
        super().free(seq)


class CountsInUse(BlockManager):
    """counts the blocks that are free, and not those that become free"""

    part = "B"

    @property
    def num_freed(self):
        return self.num_free_blocks


class CountsAText(BlockManager):
    """what is counted is no number"""

    part = "B"
    num_freed = "many"


class NeverFrees(BlockManager):
    """counts well, but whoever shares a block keeps it for ever"""

    part = "B"
    num_freed = 0

    def free(self, seq):
        for block_id in seq.block_table:
            self.num_freed += self.blocks[block_id].ref_count == 1
        if any(self.blocks[block_id].ref_count > 1 for block_id in seq.block_table):
            seq.block_table = []
        super().free(seq)


class NeverShares(BlockManager):
    """shares nothing"""

    part = "B"
    num_freed = 0

    def find_prefix(self, seq):
        return []

    def free(self, seq):
        self.num_freed += len(seq.block_table)
        super().free(seq)


class NoLimit(Scheduler):
    """the budget of the base class"""

    part = "C"


class TinyBudget(Scheduler):
    """a small budget for everybody"""

    part = "C"

    def step_budget(self):
        return 64, 64


class FixedBudget(Scheduler):
    """256 tokens, whoever runs"""

    part = "C"

    def step_budget(self):
        return 256, 256


class SomewhatMore(Scheduler):
    """300 tokens, whoever runs"""

    part = "C"

    def step_budget(self):
        return 300, 300


class OneBudget(Scheduler):
    """the right budget for the step, and the same for prompts"""

    part = "C"

    def step_budget(self):
        num_tokens = min(len(self.running) + 256, self.max_num_batched_tokens)
        return num_tokens, num_tokens


class HalfThePrompts(Scheduler):
    """128 tokens for prompts, where 256 are allowed"""

    part = "C"

    def step_budget(self):
        return min(len(self.running) + 128, self.max_num_batched_tokens), 128


class OnlyPrompts(Scheduler):
    """no tokens for those who run"""

    part = "C"

    def step_budget(self):
        return 256, 256 - len(self.running)
