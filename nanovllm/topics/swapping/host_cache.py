"""HostCache: keeps the blocks of preempted requests in host memory (paper, section 4.5)."""

import torch
from torch import Tensor

from nanovllm.layers.kv_cache import KVCache

PIECE_BYTES = 2**26


class HostCache:
    """`num_blocks` blocks, each [2, num_layers, block_size, num_kv_heads, head_dim].

    They are pinned if there is a GPU. Here a block is one piece with all its layers, while the KV
    cache has two pieces per layer: PyTorch gathers them on the device, because a bus is only fast
    with large pieces. All copies are in the order of the step's other work.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int):
        self.device_blocks = kv_cache.tensor.movedim(2, 0)
        block = self.device_blocks[0]
        self.blocks: list[Tensor] = []
        while len(self.blocks) < num_blocks:
            # in pieces: PyTorch rounds pinned memory up to a power of two
            lacking = num_blocks - len(self.blocks)
            num = max(1, PIECE_BYTES // block.nbytes)
            piece = torch.empty(
                min(num, lacking),
                *block.shape,
                dtype=block.dtype,
                pin_memory=block.is_cuda,
            )
            self.blocks += piece.unbind()

    def swap_out(self, swaps: dict[int, int]) -> None:
        """Copies block -> host block. The caller may overwrite the blocks right away."""
        for block_id, host_id in swaps.items():
            block = self.device_blocks[block_id]
            host_block = self.blocks[host_id]
            host_block.copy_(block, non_blocking=True)

    def swap_in(self, swaps: dict[int, int]) -> None:
        """Copies host block -> block."""
        for host_id, block_id in swaps.items():
            block = self.device_blocks[block_id]
            host_block = self.blocks[host_id]
            block.copy_(host_block, non_blocking=True)
