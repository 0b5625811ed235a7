"""Three empty classes: they keep the rules, and do nothing of what the docstrings say."""

from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler

is_silly = True
ANSWERS = {
    "A": {"breaks": "queues", "load": [[0.0, 20, 5]]},
    "B": {"breaks": "references", "load": [[0.0, 20, 5, 0]]},
    "C": {"breaks": "budget", "load": [[0.0, 20, 5]]},
}


class SchedulerA(Scheduler):
    pass


class BlockManagerB(BlockManager):
    pass


class SchedulerC(Scheduler):
    pass
