"""Request-level batching, as in FasterTransformer: LLM(scheduler_cls=StaticBatching)"""

from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request


class StaticBatching(Scheduler):
    """A batch starts together, and the next one starts when the last of it has ended.

    `max_num_seqs` is the size of the batch. Its prompts may take several steps. Requests that are
    done leave their seats empty.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.batch: set[Request] = set()

    def restart(self, block_manager) -> None:
        """After a step that failed, other requests may run."""
        super().restart(block_manager)
        self.batch = set()

    def schedule_waiting(self, schedule: Schedule) -> None:
        if all(request.has_ended for request in self.batch):
            self.batch = self._next_batch()
        super().schedule_waiting(schedule)

    def next_waiting(self) -> Request | None:
        return next((request for request in self.waiting if request in self.batch), None)

    def _next_batch(self) -> set[Request]:
        batch, num_seqs = set(), 0
        for request in sorted(self.waiting, key=self.priority):
            num_seqs += request.most_sequences
            if num_seqs > self.max_num_seqs:
                break
            batch.add(request)
        return batch
