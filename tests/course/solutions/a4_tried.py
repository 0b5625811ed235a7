"""What was tried for assignment 4, beside its solution."""

from nanovllm.scheduler import Scheduler
from tutorials.assignments.silly import Silly


class SomeReserve(Silly):
    """watermark of 10 %"""

    watermark = 0.1


class MuchReserve(Silly):
    """watermark of 20 %"""

    watermark = 0.2


class MostReserve(Silly):
    """watermark of 30 %"""

    watermark = 0.3


class AdmitAndPreempt(Silly):
    """admits and preempts each request at once"""

    def __init__(self, limits, block_manager):
        super().__init__(limits, block_manager)
        self.seen = set()

    def make_room(self, schedule):
        for request in [*self.running]:
            if request in self.seen:
                continue
            self.seen.add(request)
            self.preempt(request)


class NeverSwap(Scheduler):
    """never swap"""

    def should_swap(self, request):
        return False


def own_blocks(scheduler, request):
    """Those that no other request holds."""
    blocks = scheduler.block_manager.blocks
    return [i for s in request.unfinished for i in s.block_table if blocks[i].ref_count == 1]


class FewestBlocks(Scheduler):
    """the one with fewest blocks is the victim"""

    def victim(self, candidates):
        return min(reversed(candidates), key=lambda request: len(request.sequences[0].block_table))


class SwapOwnBlocks(Scheduler):
    """one rule for `should_swap`"""

    def should_swap(self, request):
        num_blocks = sum(len(seq.block_table) for seq in request.unfinished)
        return len(own_blocks(self, request)) > 0.5 * num_blocks


class SwapOwnBlocksOfTheSmallest(FewestBlocks, SwapOwnBlocks):
    """the same, and another victim"""
