"""Three classes, each with one bug. Say which invariant it breaks, and mend it."""

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler

ANSWERS = {"A": "queues", "B": "references", "C": "budget"}


class SchedulerA(Scheduler):
    """Short prompts first. Whoever was preempted comes back before all others."""

    def __init__(self, *args):
        super().__init__(*args)
        self.preempted = []

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival

    def preempt(self, request):
        super().preempt(request)
        self.preempted.append(request)  # it stays in `waiting`, too

    def next_waiting(self):
        back = [request for request in self.preempted if request in self.waiting]
        return back[0] if back else super().next_waiting()


class BlockManagerB(BlockManager):
    """Also counts how many blocks became free: those that nobody else reads."""

    num_freed = 0

    def free(self, seq):
        self.num_freed += sum(self.blocks[block_id].ref_count == 1 for block_id in seq.block_table)
        super().free(seq)  # it counts the references


class SchedulerC(Scheduler):
    """A step has a token for everybody who runs, and up to 256 tokens of prompts."""

    def step_budget(self):
        return min(len(self.running) + 256, self.max_num_batched_tokens), 256
