"""What chapter 10 needs to look into kernels while they run in Triton's interpreter: what each
program loads, and a changed copy of kernels. Linux only, as Triton.

Import it after TRITON_INTERPRET has been set to 1.
"""

import importlib.util
import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder


@triton.jit
def store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program t copies the key and value of token t into its slot.

    They have WIDTH = num_kv_heads * head_dim numbers each.
    """
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    is_number = i < WIDTH
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:  # a padding row of a CUDA graph has none
        key = tl.load(k + t * k_stride + i, mask=is_number)
        tl.store(k_cache + slot * WIDTH + i, key, mask=is_number)
        value = tl.load(v + t * v_stride + i, mask=is_number)
        tl.store(v_cache + slot * WIDTH + i, value, mask=is_number)


class Load(NamedTuple):
    """What one program has read with one tl.load."""

    program: tuple[int, int, int]
    name: str  # of the tensor
    places: list[int]  # of the numbers in it, without numbers that a mask left out
    num_bytes: int


@contextmanager
def loads_of(**tensors: Tensor) -> Iterator[list[Load]]:
    """Notes each load from these tensors, while kernels run in Triton's interpreter.

    They must be on the CPU and contiguous. A load of several numbers reads all of them at once.
    """
    loads: list[Load] = []
    ranges = {
        name: (tensor.data_ptr(), tensor.nbytes, tensor.element_size())
        for name, tensor in tensors.items()
    }
    original = interpreter_builder.create_masked_load

    def load(ptrs, mask, *others):
        wanted = np.asarray(ptrs.data)[np.asarray(mask.data, dtype=bool)].astype(np.int64)
        for name, (start, size, itemsize) in ranges.items():
            found = wanted[(start <= wanted) & (wanted < start + size)]
            if len(found):
                places = ((found - start) // itemsize).tolist()
                num_bytes = len(set(places)) * itemsize
                loads.append(Load(interpreter_builder.grid_idx, name, places, num_bytes))
        return original(ptrs, mask, *others)

    interpreter_builder.create_masked_load = load
    try:
        yield loads
    finally:
        interpreter_builder.create_masked_load = original


FOLDER = tempfile.TemporaryDirectory()


def changed(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of a module of kernels, with one piece of text replaced by another.

    It is a file, since Triton reads a kernel's source from there.
    """
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"this is there {source.count(old)} times: {old}"
    path = Path(FOLDER.name, f"changed{abs(hash((old, new)))}.py")
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
