"""Request-level batching, as in FasterTransformer and in every engine before Orca: LLM(scheduler_cls=StaticBatching)"""

from nanovllm.scheduler import Schedule, Scheduler
from nanovllm.sequence import Request


class StaticBatching(Scheduler):
    """A batch starts together, and the next one starts when the last of it has ended.

    `max_num_seqs` is the size of the batch. Its prompts may take several steps. Requests that are done leave their
    seats empty.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.batch: set[Request] = set()

    def restart(self, requests, block_manager) -> None:
        """After a step that failed: who runs then may be others."""
        super().restart(requests, block_manager)
        self.batch = set()

    def _schedule_waiting(self, schedule: Schedule) -> None:
        if all(not request.unfinished for request in self.batch):
            self.batch = self._next_batch()
        later = [request for request in self.waiting if request not in self.batch]
        self.waiting = [request for request in self.waiting if request in self.batch]
        super()._schedule_waiting(schedule)
        self.waiting += later

    def _next_batch(self) -> set[Request]:
        batch, num_seqs = set(), 0
        for request in sorted(self.waiting, key=self.priority):
            num_seqs += request.num_seats
            if num_seqs > self.max_num_seqs:
                break
            batch.add(request)
        return batch
