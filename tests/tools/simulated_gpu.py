"""A GPU without a GPU: `ttsem` executes what Triton compiles of a kernel, and this module simulates CUDA graphs.

A recording keeps all operations of PyTorch and all launches of kernels, with their tensors. A replay does the same with the
same tensors. Before that, it overwrites what the operations of all recordings have left, because graphs share memory: what
is read there without being computed again is NaN.

Run: python -m tests.tools.simulated_gpu CAPABILITY [--report FILE] [arguments of pytest]
"""

import json
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

NOT_WRITTEN = ("empty", "empty_like", "empty_strided", "new_empty")


class Graph:
    """In place of torch.cuda.CUDAGraph."""

    all: ClassVar[list["Graph"]] = []
    recorded: ClassVar["Graph | None"] = None  # the one that is being recorded

    def __init__(self):
        self.calls: list[Any] = []
        self.results: list[Tensor] = []
        self.all.append(self)

    def pool(self) -> int:
        return 0

    def replay(self) -> None:
        for graph in self.all:
            for result in graph.results:
                result.fill_(torch.nan if result.is_floating_point() else 99_999)
        for call in self.calls:
            call()


class Recording(TorchDispatchMode):
    """In place of torch.cuda.graph: runs operations, and keeps them in a graph."""

    def __init__(self, graph: Graph, **options: Any):
        super().__init__()
        self.graph = graph

    def __enter__(self):
        Graph.recorded = self.graph
        return super().__enter__()

    def __exit__(self, *error):
        Graph.recorded = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a recording reads a number of the device")
        call = partial(operation, *args, **(kwargs or {}))
        result = call()
        results = tensors_of(result)
        # its schema does not say it: `flatten` may be a view or a copy
        is_view = {*map(memory_of, results)} & {*map(memory_of, tensors_of([args, kwargs]))}
        if operation._schema.is_mutable:
            self.graph.calls.append(call)
        elif not is_view:
            self.graph.results += results
            if operation.__name__.partition(".")[0] not in NOT_WRITTEN:
                self.graph.calls.append(partial(again, call, results))
        return result


def tensors_of(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def again(call: Any, results: list[Tensor]) -> None:
    """Computes the results anew, in their memory."""
    for result, value in zip(results, tensors_of(call()), strict=True):
        result.copy_(value)


class Stream:
    """In place of torch.cuda.Stream. The engine needs one only to record."""

    def __init__(self, device: Any = None):
        self.device = device


class Event:
    """In place of torch.cuda.Event: all is computed when it is launched."""

    def record(self) -> None:
        """Nothing is in flight."""

    synchronize = record


class Generator(torch.Generator):
    """In place of torch.Generator: on the CPU."""

    def __new__(cls, device: Any = None):
        return super().__new__(cls)


@contextmanager
def simulated_gpu(capability: int):
    """ttsem's session, and what it lacks."""
    from triton.runtime.jit import JITFunction
    from ttsem import sanitize

    with sanitize.session(capability) as session, pytest.MonkeyPatch.context() as patch:
        run, empty = JITFunction.run, torch.empty

        def launch(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            call = partial(run, kernel, *args, warmup=warmup, **options)
            if Graph.recorded is not None and not warmup:
                Graph.recorded.calls.append(call)
            with _disable_current_modes():
                return call()

        patch.setattr(JITFunction, "run", launch)
        # a driver would pin it
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **options: empty(*a, **options))
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", Recording)
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**28, 2**28))

        # a GPU with 128 multiprocessors has 1,500 programs in each layer, which take most of the time
        patch.setattr("nanovllm.layers.triton_plan.share_of", lambda *args: 8)

        # all tokens of a step without a request write to one block
        patch.setattr("nanovllm.device.memory.memory_left", lambda runner, config: 2**24)
        patch.setattr("nanovllm.model_runner.ModelRunner.warm_up", lambda runner: None)
        yield session


def facts() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    packages = {name: version(name) for name in ("ttsem", "triton", "torch", "transformers")}
    where = {"command": "scripts/without_gpu", "device": "none: ttsem on a CPU"}
    return {"commit": commit.stdout.strip(), "python": platform.python_version()} | where | packages


def main(capability: str, *arguments: str) -> int:
    report = None
    if arguments[:1] == ("--report",):
        report, arguments = Path(arguments[1]), arguments[2:]
    begin = time.time()
    with simulated_gpu(int(capability)) as session:
        status = pytest.main(["--gpu", "-p", "no:cacheprovider", *arguments])
    result = {
        "exit_status": int(status),
        "launches": session.launches,
        "launches_not_checked_for_races": session.races_unchecked,
        "seconds": round(time.time() - begin),
    }
    print(json.dumps(result))
    if report is not None:
        whole = json.loads(report.read_text()) if report.exists() else {"runs": {}}
        whole |= facts()
        whole["runs"][" ".join([capability, *arguments])] = result
        report.write_text(json.dumps(whole, indent=2) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
