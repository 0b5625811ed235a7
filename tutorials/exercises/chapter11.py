"""Your answers to the exercises of chapter 11. To check them: python -m tutorials.check 11"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


# --- 11.1 ---
def size_for(num_rows: int, sizes: list[int]) -> int | None:
    """The smallest recorded size that is large enough. The sizes come in any order."""
    raise NotImplementedError


# --- 11.2 ---
class Recorder(TorchDispatchMode):
    """Runs operations as always, and notes them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, result in self.calls:
            result.copy_(function(*args, **kwargs))


class Recorded:
    """A model, recorded once."""

    def __init__(self, model: Callable[[Tensor, Tensor], Tensor], size: int, no_slot: int):
        """`model` takes ids and slots, [size] int64 each, and returns new ids [size]. What it
        writes into the slot `no_slot` is never read."""
        raise NotImplementedError

    def run(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The new ids of up to `size` rows, by a replay."""
        raise NotImplementedError


# --- 11.3 ---
class Graphs:
    """A model, recorded for several numbers of rows."""

    def __init__(self, model: Callable[[Tensor, Tensor], Tensor], sizes: list[int], no_slot: int):
        """`model` and `no_slot` are as in Recorded."""
        raise NotImplementedError

    def run(self, ids: Tensor, slots: Tensor) -> Tensor:
        """The new ids, by a replay of the smallest recording that is large enough. Without one, by
        the model."""
        raise NotImplementedError
