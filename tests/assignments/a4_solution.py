from nanovllm.scheduler import Scheduler


def blocks_of(request):
    return [block_id for seq in request.unfinished for block_id in seq.block_table]


class MyScheduler(Scheduler):
    """Preempts as cheaply as it can, and as seldom: who has least to lose; to the host only what
    nobody else holds."""

    watermark = 0.15  # so that those who run can grow

    def victim(self, candidates):
        return min(reversed(candidates), key=lambda request: len(blocks_of(request)))

    def should_swap(self, request):
        blocks = [self.block_manager.blocks[block_id] for block_id in blocks_of(request)]
        return sum(block.ref_count == 1 for block in blocks) > 0.5 * len(blocks)
