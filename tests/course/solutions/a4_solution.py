from nanovllm.scheduler import Scheduler


class MyScheduler(Scheduler):
    """To the host goes only what would have to be computed again."""

    watermark = 0.1  # so that running requests can grow

    def should_swap(self, request):
        blocks = [self.block_manager.blocks[i] for s in request.unfinished for i in s.block_table]
        return sum(block.ref_count == 1 for block in blocks) > 0.5 * len(blocks)
