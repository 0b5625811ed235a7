"""HostCache: keeps the blocks of preempted requests in host memory (paper, section 4.5)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanovllm.layers.kv_cache import KVCache

STAGED_BYTES = 2**26


class HostCache:
    """`num_blocks` blocks, each [2, num_layers, block_size, num_kv_heads, head_dim].

    They are pinned if there is a GPU. Here a block is one piece with all its layers, while the KV
    cache has two pieces per layer: a bus is only fast with large pieces. On the device, one kernel
    gathers blocks into a small buffer, or scatters them from it. Between buffer and host they are
    copied on a separate stream, so that swapping out overlaps with the step's computation.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int):
        self.device_blocks = kv_cache.tensor.movedim(2, 0)
        block = self.device_blocks[0]
        is_cuda = kv_cache.tensor.is_cuda
        num_staged = max(1, STAGED_BYTES // block.nbytes)
        self.staged = block.new_empty(num_staged, *block.shape)
        self.blocks: list[Tensor] = []
        while len(self.blocks) < num_blocks:
            # in pieces: PyTorch rounds pinned memory up to a power of two
            lacking = num_blocks - len(self.blocks)
            num = min(num_staged, lacking)
            shape = (num, *block.shape)
            piece = torch.empty(
                shape,
                dtype=block.dtype,
                pin_memory=is_cuda,
            )
            self.blocks += piece.unbind()
        self.backend = torch.cuda if is_cuda else torch.cpu  # on a CPU, streams do nothing
        self.stream = self.backend.Stream()

    def _pieces(self, swaps: dict[int, int]) -> Iterator[dict[int, int]]:
        """Yields as many blocks at a time as fit into the buffer."""
        pairs = list(swaps.items())
        size = len(self.staged)
        for begin in range(0, len(pairs), size):
            end = begin + size
            yield dict(pairs[begin:end])

    def swap_out(self, swaps: dict[int, int]) -> None:
        """Copies block -> host block. The caller may overwrite the blocks right away."""
        main = self.backend.current_stream()
        for piece in self._pieces(swaps):
            staged = self.staged[: len(piece)]
            ids = list(piece)
            block_ids = torch.tensor(ids, device=staged.device)
            main.wait_stream(self.stream)  # the buffer may still be in use by a copy to the host
            torch.index_select(self.device_blocks, 0, block_ids, out=staged)
            self.stream.wait_stream(main)
            with self.backend.stream(self.stream):
                for host_id, block in zip(piece.values(), staged):
                    host_block = self.blocks[host_id]
                    host_block.copy_(block, non_blocking=True)

    def swap_in(self, swaps: dict[int, int]) -> None:
        """Copies host block -> block."""
        main = self.backend.current_stream()
        for piece in self._pieces(swaps):
            staged = self.staged[: len(piece)]
            ids = list(piece.values())
            block_ids = torch.tensor(ids, device=staged.device)
            self.stream.wait_stream(main)  # the buffer's last contents may still be in use
            with self.backend.stream(self.stream):
                for host_id, block in zip(piece, staged):
                    host_block = self.blocks[host_id]
                    block.copy_(host_block, non_blocking=True)
            main.wait_stream(self.stream)
            self.device_blocks.index_copy_(0, block_ids, staged)
