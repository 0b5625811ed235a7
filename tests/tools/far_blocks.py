"""A batch in a cache so large that 32 bits cannot count its numbers; on a CPU, only its addresses."""

import math
import mmap
from dataclasses import replace

import torch

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.11 on


def moved_away(batch: Batch) -> tuple[Batch, int]:
    """The same batch in a cache with so many blocks before its own that 32 bits cannot count their
    numbers, and the first of its own.

    Before the cache is memory, too: where a kernel reads whose addresses wrap around.
    """
    near = batch.kv_cache.tensor
    first = 2**31 // near[0, 0, 0].numel() + 1
    num_blocks = first + near.shape[2]
    shape = (2, near.shape[1], num_blocks, *near.shape[3:])
    numbers = untouched(2**31 + math.prod(shape), near)
    far = numbers[2**31 :].view(shape)
    far[:, :, first:] = near
    moved = replace(
        batch,
        kv_cache=KVCache(far),
        slot_mapping=batch.slot_mapping + first * near.shape[3],
        block_tables=batch.block_tables + first,
    )
    return moved, first


def untouched(size: int, like: torch.Tensor) -> torch.Tensor:
    """On a CPU only addresses: what is never written takes no memory, and is 0."""
    if like.is_cuda:
        return like.new_empty(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, size * like.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=like.dtype)
