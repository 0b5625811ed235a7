"""Three classes, each with one bug. Show which invariant it breaks, and fix it."""

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler

ANSWERS = {
    "A": {"breaks": "queues", "load": [[0.0, 16, 2], [0.0, 32, 2], [0.0, 48, 2]]},
    "B": {"breaks": "references", "load": [[0.0, 17, 1, 16], [0.0, 17, 2, 16]]},
    "C": {"breaks": "budget", "load": [[0.0, 1, 2]] * 5 + [[0.001, 256, 1]]},
}


class SchedulerA(Scheduler):
    """Short prompts first. Whoever was preempted comes back before all others; of several, first who
    was preempted first."""

    def __init__(self, *args):
        super().__init__(*args)
        self.preempted = []

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival

    def preempt(self, request):
        super().preempt(request)
        self.preempted.append(request)  # it stays in `waiting`, too

    def next_waiting(self):
        return self.preempted[0] if self.preempted else super().next_waiting()

    def admit(self, request):
        super().admit(request)
        self.preempted = [other for other in self.preempted if other is not request]


class BlockManagerB(BlockManager):
    """Also counts how many blocks became free: those that nobody else reads."""

    num_freed = 0

    def free(self, seq):
        self.num_freed += sum(self.blocks[block_id].ref_count == 1 for block_id in seq.block_table)
        super().free(seq)


class SchedulerC(Scheduler):
    """A step has a token for everybody who runs, and up to 256 tokens of prompts."""

    def step_budget(self):
        return min(len(self.running) + 256, self.max_num_batched_tokens), 256
