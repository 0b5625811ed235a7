"""HostCache: where the blocks of preempted requests wait, in the host's memory (paper, section 4.5)."""

from collections.abc import Iterator

import torch

STAGED_BYTES = 2**26


class HostCache:
    """`num_blocks` blocks as [num_blocks, 2, num_layers, block_size, num_kv_heads, head_dim], pinned if there is a GPU.

    A block is one piece with all its layers, where the KV cache has two pieces per layer: a bus is fast with large
    pieces only. On the device, blocks are gathered into a small buffer, or spread from it, by one kernel. Between buffer
    and host they travel on a stream of their own, so that what is swapped out is on its way while the step computes.
    """

    def __init__(self, kv_cache: torch.Tensor, num_blocks: int):
        _, num_layers, _, *block_shape = kv_cache.shape
        shape, is_cuda = (2, num_layers, *block_shape), kv_cache.device.type == "cuda"
        self.kv_cache = kv_cache
        self.blocks = torch.empty(num_blocks, *shape, dtype=kv_cache.dtype, pin_memory=is_cuda)
        self.staged = kv_cache.new_empty(max(1, STAGED_BYTES // self.blocks[0].nbytes), *shape)
        self.backend = torch.cuda if is_cuda else torch.cpu  # a CPU's streams do nothing
        self.stream = self.backend.Stream()

    def _pieces(self, swaps: dict[int, int]) -> Iterator[tuple[list[int], list[int], torch.Tensor]]:
        """(from, to, buffer for them): as many at a time as the buffer has room for."""
        pairs, size = list(swaps.items()), len(self.staged)
        for i in range(0, len(pairs), size):
            sources, targets = zip(*pairs[i : i + size])
            yield list(sources), list(targets), self.staged[: len(sources)]

    def swap_out(self, swaps: dict[int, int]) -> None:
        """Copies block -> host block. The blocks may be overwritten at once."""
        main = self.backend.current_stream()
        for block_ids, host_ids, staged in self._pieces(swaps):
            main.wait_stream(self.stream)  # the buffer may still be on its way to the host
            staged.copy_(self.kv_cache[:, :, block_ids].movedim(2, 0))
            self.stream.wait_stream(main)
            with self.backend.stream(self.stream):
                for host_id, block in zip(host_ids, staged):
                    self.blocks[host_id].copy_(block, non_blocking=True)

    def swap_in(self, swaps: dict[int, int]) -> None:
        """Copies host block -> block."""
        main = self.backend.current_stream()
        for host_ids, block_ids, staged in self._pieces(swaps):
            self.stream.wait_stream(main)  # the buffer may still be read
            with self.backend.stream(self.stream):
                for block, host_id in zip(staged, host_ids):
                    block.copy_(self.blocks[host_id], non_blocking=True)
            main.wait_stream(self.stream)
            self.kv_cache[:, :, block_ids] = staged.movedim(0, 2)
