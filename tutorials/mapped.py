"""What chapter 20 looks at: bytes that are copied out of a KV cache, and rows of addresses that change."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM
from nanovllm.layers.kv_cache import KVCache

aten = torch.ops.aten
COPIES = {aten.index_select, aten.index, aten.gather, aten.take, aten.clone, aten._to_copy}


class Copies(TorchDispatchMode):
    """Counts the bytes that PyTorch copies out of the KV cache of an engine."""

    def __init__(self, llm: LLM):
        super().__init__()
        self.llm = llm
        self.copied = 0
        self.places = [place_of(view) for view in views_of(llm.runner.kv_cache)]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in COPIES and self.is_cached(args[0]):
            self.copied += result.nbytes
        return result

    def is_cached(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() in place for place in self.places)

    @property
    def new(self) -> int:
        """The bytes of all keys and values that the engine has computed."""
        token_bytes = self.llm.runner.kv_cache.tensor[:, :, 0, 0].nbytes
        return self.llm.stats()["computed_tokens"] * token_bytes


def views_of(cache: KVCache) -> list[Tensor]:
    """Blocks, and rows if the cache has them."""
    rows = getattr(cache, "rows", None)
    return [cache.tensor] if rows is None else [cache.tensor, rows.tensor]


def place_of(tensor: Tensor) -> range:
    """The addresses of its memory."""
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class Rows:
    """Prints what the rows of a VirtualCache show, after each step in which that has changed."""

    def __init__(self, llm: LLM):
        self.page_table = llm.runner.kv_cache.page_table
        self.before: list[list[int]] = [[] for _ in self.page_table.shown]
        self.num_steps = 0
        llm.observers.append(self.see)

    def see(self, schedule, seconds) -> None:
        self.num_steps += 1
        now = [[*blocks] for blocks in self.page_table.shown]
        mapped = [block for pair in zip(self.before, now) for block in new_blocks(*pair)]
        if mapped:
            rows = ", ".join(f"row {i} {blocks}" for i, blocks in enumerate(now))
            print(f"step {self.num_steps:2}: {rows}; mapped: {mapped}")
        self.before = now


def new_blocks(before: list[int], now: list[int]) -> list[int]:
    """Those that stand where another one was, or none."""
    return [block for i, block in enumerate(now) if before[i : i + 1] != [block]]
