"""Three classes, each with one bug. Show which invariant it breaks, and fix it."""

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler

# TODO: the name of an invariant, and a small load that breaks it, see README.md
ANSWERS = {
    "A": {"breaks": "?", "load": [[0.0, 20, 5]]},  # seconds, prompt tokens, output tokens
    "B": {"breaks": "?", "load": [[0.0, 20, 5, 0]]},  # the last one: shared tokens
    "C": {"breaks": "?", "load": [[0.0, 20, 5]]},
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
        self.waiting.remove(request)
        self.preempted.append(request)

    def next_waiting(self):
        if self.preempted:
            self.waiting.append(self.preempted.pop(0))
            return self.waiting[-1]
        return super().next_waiting()


class BlockManagerB(BlockManager):
    """Also counts how many blocks became free: those that nobody else reads."""

    num_freed = 0

    def free(self, seq):
        for block_id in seq.block_table:
            block = self.blocks[block_id]
            if block.ref_count > 1:
                block.ref_count -= 1  # others still read it
            else:
                self.num_freed += 1
        super().free(seq)


class SchedulerC(Scheduler):
    """A step has a token for everybody who runs, and up to 256 tokens of prompts."""

    def step_budget(self):
        return len(self.running) + 256, 256
