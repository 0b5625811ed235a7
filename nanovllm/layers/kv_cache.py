"""KVCache: what sequences keep on the device. Keys and values of their tokens in all layers, in
blocks; in a hybrid model, states, too."""

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CacheShape(NamedTuple):
    """The shape of a KV cache with any number of blocks."""

    num_layers: int  # with keys and values
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    states: tuple[tuple[int, ...], ...] = ()  # of a sequence, in fp32: [layers with states, ...]
    num_slots: int = 0  # sequences with states

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, with the keys and values of all layers."""
        width = self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * self.block_size * width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots. Slot 0 is for padding."""
        numbers = sum(torch.Size(shape).numel() for shape in self.states)
        return torch.float32.itemsize * numbers * (self.num_slots + 1)

    def new_cache(self, num_blocks: int, device: torch.device) -> "KVCache":
        """Allocates zeros, so that a read of the wrong slot gives the same result in each run."""
        shape = (2, self.num_layers, num_blocks, *self[1:4])
        tensor = zeros(shape, self.dtype, device)
        states = []
        for num_layers, *sizes in self.states:
            of_all = (num_layers, self.num_slots + 1, *sizes)
            states.append(zeros(of_all, torch.float32, device))
        return KVCache(tensor, states)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Does what torch.zeros does. On a CPU, memory is taken when it is first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # anonymous pages are zero and take no memory until they are touched; private ones,
    # or a process that is forked off would write into them, too
    is_posix = hasattr(mmap, "MAP_ANONYMOUS")
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_posix else {}
    pages = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, **private)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class KVCache:
    """Owns the memory of all blocks.

    tensor: keys, then values [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    layers: of each, keys and values [num_blocks, block_size, num_kv_heads, head_dim]
    states: of the layers without keys and values [layers, slots, ...] (chapter 23)

    stored(numbers, dtype): keys or values as the cache keeps them, in its dtype. restored(rows,
    dtype): the numbers of what was read from it, in the model's dtype. Keys and values in 8 bits
    have a class of their own: see topics/quantization/kv_cache.py.
    """

    stored: Callable[..., Tensor] = staticmethod(Tensor.to)
    restored: Callable[..., Tensor] = staticmethod(Tensor.to)

    def __init__(self, tensor: Tensor, states: Sequence[Tensor] = ()):
        self.tensor = tensor
        self.states = states
        self.layers = list(zip(*tensor))
        self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim = tensor.shape[2:]

    def slots(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """int64: rows of a layer's keys, or values, seen as [slots, num_kv_heads, head_dim]."""
        return block_ids.long() * self.block_size + offsets

    def copy_slots(self, copies: Tensor) -> None:
        """Copies states, as Ops.copy_blocks does blocks. All are read before any is written."""
        sources, targets = copies.unbind(1)
        for tensor in self.states:
            tensor[:, targets] = tensor[:, sources]
