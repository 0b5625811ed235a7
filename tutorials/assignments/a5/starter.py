from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """Who finds much in the prefix cache comes first. So far: first come, first served."""

    def next_waiting(self):
        # TODO: `self.waiting` is sorted, the oldest first.
        # `self.block_manager.find_prefix(request.sequences[0])` is the list of the blocks that a
        # request would find, and takes none of them.
        # TODO: nobody may wait much longer than before.
        return super().next_waiting()
