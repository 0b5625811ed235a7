"""Python imports this first in each process whose PYTHONPATH has this folder. It replaces what PyTorch says of bfloat16 in
hardware: no variable of PyTorch does. See tests/tools/machines.py.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder

VARIABLE = "NANOVLLM_SIMULATED_BF16"  # "1": PyTorch reports bfloat16 in hardware; "0": it does not


class Changing(Loader):
    """Loads torch.cpu, then changes it."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        self.loader.exec_module(module)
        answer = os.environ[VARIABLE] == "1"
        module._is_avx512_bf16_supported = lambda: answer


class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Changing(spec.loader)
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, Finder())
