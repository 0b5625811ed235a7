"""Request-level batching, as in FasterTransformer and in every engine before Orca: LLM(scheduler_cls=StaticBatching)"""

from nanovllm.scheduler import Schedule, Scheduler


class StaticBatching(Scheduler):
    """A batch starts together, and the next one starts when the last of it has ended.

    `max_num_seqs` is the size of the batch. Requests that are done leave their seats empty.
    """

    def _schedule_waiting(self, schedule: Schedule, budget: int) -> None:
        if not self.running:
            super()._schedule_waiting(schedule, budget)
