"""HostCache: keeps the blocks of preempted requests in host memory (paper, section 4.5)."""

from collections.abc import Iterable, Iterator

import torch

STAGED_BYTES = 2**26


class HostCache:
    """`num_blocks` blocks, each [2, num_layers, block_size, num_kv_heads, head_dim], pinned if there is a GPU.

    Here a block is one piece with all its layers, while the KV cache has two pieces per layer: a bus is only fast with
    large pieces. On the device, one kernel gathers blocks into a small buffer, or scatters them from it. Between buffer
    and host they are copied on a separate stream, so that swapping out overlaps with the step's computation.
    """

    def __init__(self, kv_cache: torch.Tensor, num_blocks: int):
        self.kv_cache = kv_cache.movedim(2, 0)
        shape, is_cuda = self.kv_cache.shape[1:], kv_cache.device.type == "cuda"
        size = max(1, STAGED_BYTES // self.kv_cache[0].nbytes)
        self.staged = kv_cache.new_empty(size, *shape)
        self.blocks: list[torch.Tensor] = []
        while (
            len(self.blocks) < num_blocks
        ):  # in pieces: PyTorch rounds pinned memory up to a power of two
            num = min(size, num_blocks - len(self.blocks))
            piece = torch.empty(num, *shape, dtype=kv_cache.dtype, pin_memory=is_cuda)
            self.blocks += piece.unbind()
        self.backend = torch.cuda if is_cuda else torch.cpu  # on a CPU, streams do nothing
        self.stream = self.backend.Stream()

    def _pieces(self, block_ids: Iterable[int], host_ids: Iterable[int]) -> Iterator[tuple]:
        """Yields (block ids on the device, list of host ids, buffer for them), as many as fit into the buffer."""
        block_ids, host_ids, size = torch.tensor(list(block_ids)), list(host_ids), len(self.staged)
        for i in range(0, len(host_ids), size):
            some = block_ids[i : i + size].to(self.staged.device)
            yield some, host_ids[i : i + size], self.staged[: len(some)]

    def swap_out(self, swaps: dict[int, int]) -> None:
        """Copies block -> host block. The caller may overwrite the blocks right away."""
        main = self.backend.current_stream()
        for block_ids, host_ids, staged in self._pieces(swaps.keys(), swaps.values()):
            main.wait_stream(self.stream)  # the buffer may still be in use by a copy to the host
            torch.index_select(self.kv_cache, 0, block_ids, out=staged)
            self.stream.wait_stream(main)
            with self.backend.stream(self.stream):
                for host_id, block in zip(host_ids, staged):
                    self.blocks[host_id].copy_(block, non_blocking=True)

    def swap_in(self, swaps: dict[int, int]) -> None:
        """Copies host block -> block."""
        main = self.backend.current_stream()
        for block_ids, host_ids, staged in self._pieces(swaps.values(), swaps.keys()):
            self.stream.wait_stream(main)  # the buffer's last contents may still be in use
            with self.backend.stream(self.stream):
                for block, host_id in zip(staged, host_ids):
                    block.copy_(self.blocks[host_id], non_blocking=True)
            main.wait_stream(self.stream)
            self.kv_cache.index_copy_(0, block_ids, staged)
