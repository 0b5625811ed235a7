"""Python imports this first in each process whose PYTHONPATH has this folder: it plays a part of another machine that
no variable of PyTorch's plays. See tests/tools/machines.py.
"""

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from types import ModuleType

VARIABLE = "NANOVLLM_PLAYED_BF16"  # "1": PyTorch reports bfloat16 in hardware; "0": it does not


def play_bf16(cpu: ModuleType) -> None:
    answer = os.environ[VARIABLE] == "1"
    cpu._is_avx512_bf16_supported = lambda: answer


class Playing(Loader):
    """Loads a module, then changes it."""

    def __init__(self, loader: Loader, change: Callable[[ModuleType], None]):
        self.loader = loader
        self.change = change

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        self.loader.exec_module(module)
        self.change(module)


class Finder(MetaPathFinder):
    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]):
        self.changes = changes

    def find_spec(self, name, path, target=None):
        if name not in self.changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Playing(spec.loader, self.changes[name])
        return spec


def change(changes: dict[str, Callable[[ModuleType], None]]) -> None:
    """Changes modules: those that are loaded now, others when they are."""
    for name in changes.keys() & sys.modules.keys():
        changes[name](sys.modules[name])
    sys.meta_path.insert(0, Finder(changes))


if VARIABLE in os.environ:
    change({"torch.cpu": play_bf16})
if "NANOVLLM_PLAYED_ELSEWHERE" in os.environ:
    import elsewhere

    change(elsewhere.AFTER_LOADING)
    elsewhere.play()
