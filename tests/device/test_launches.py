"""What a step launches on a GPU, and that the host waits for nothing meanwhile. Kernels are counted, and not run: so no GPU
is needed.

Run: pytest tests/device/test_launches.py
"""

from typing import Any

import pytest
import torch
from backends import PROBLEM
from checkpoints import new_model, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm import LLM, SamplingParams
from nanovllm.backends import triton_ops
from nanovllm.device import caches
from nanovllm.device.memory import dummy_step, warm_up_steps
from nanovllm.layers import triton_plan

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))]
NOT_LAUNCHED = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view")
WAITS = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "bincount")


def memory_of(tree: Any) -> set[int]:
    """Addresses. A weight of oneDNN has none: it stands for one on the device, which no operation reads without another."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {one.untyped_storage().data_ptr() for one in tensors if one.layout is torch.strided}


class Gpu(TorchDispatchMode):
    """Knows which tensors would be on a GPU: weights, caches, what is moved there, and what is computed from these. Notes
    the operations of PyTorch that launch a kernel, and those that wait for one."""

    def __init__(self):
        super().__init__()
        self.memory: set[int] = set()
        self.kept = []  # so that no address is used again
        self.launches = []
        self.waits = []

    def mark(self, tree: Any) -> Any:
        self.kept.append(tree)
        self.memory |= memory_of(tree)
        return tree

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.__name__.partition(".")[0]
        inputs = memory_of([args, kwargs])
        if inputs & self.memory:
            self.mark(result)
            if name in WAITS:
                self.waits.append(name)
        is_view = memory_of(result) & inputs
        if operation._schema.is_mutable or not (is_view or name in NOT_LAUNCHED):
            self.launches.append(name)
        return result


@pytest.fixture
def gpu(monkeypatch):
    from triton.runtime import interpreter

    gpu = Gpu()
    monkeypatch.setattr(
        interpreter.GridExecutor,
        "__call__",
        lambda executor, *args, **options: gpu.launches.append(executor.fn.__name__),
    )
    monkeypatch.setattr(triton_plan, "share_of", lambda *args: 8)  # contexts may be in parts
    return gpu


def engine(path, family: str, options: dict | None = None, **sizes) -> LLM:
    options = {"dtype": "float32", "num_blocks": 20, "block_size": 4, "max_num_seqs": 4} | (
        options or {}
    )
    model = save(new_model(family, **sizes), path)
    return LLM(model, attention_backend="triton", check_kernels="never", **options)


def layers_of(family: str, count: int) -> dict[str, Any]:
    """Of hybrid models, all but one have a state."""
    kinds = ["full_attention"] + ["linear_attention"] * (count - 1)
    return {"num_hidden_layers": count} | ({"layer_types": kinds} if "3_5" in family else {})


@pytest.mark.parametrize(
    "family, most",
    [("qwen3", 10), ("qwen3_moe", 16), ("qwen3_5_text", 11), ("qwen3_5_moe_text", 24)],
)
def test_launches_of_a_layer(family, most, gpu, tmp_path):
    """In a recorded decode, with contexts in parts. A product of PyTorch is one launch."""
    counts = []
    for count in (2, 3):
        with engine(tmp_path / str(count), family, **layers_of(family, count)) as llm, gpu:
            llm.runner.recorder.record(2)  # padding
            gpu.launches.clear()
            llm.runner.recorder.replays[2]()
            counts.append(len(gpu.launches))
    assert counts[1] - counts[0] == most


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_the_host_does_not_wait(family, gpu, tmp_path, monkeypatch):
    """While it launches a step with prompts, decodes and copies. `collect` waits."""
    layout, move = triton_ops.layout, caches.move
    monkeypatch.setattr(triton_ops, "layout", lambda batch: gpu.mark(vars(batch)) and layout(batch))
    monkeypatch.setattr(caches, "move", lambda *args: gpu.mark(move(*args)))
    tensor = torch.tensor

    def made(*args: Any, **options: Any) -> Tensor:
        gpu.waits += ["tensor"] * ("device" in options)  # the memory that it copies is not pinned
        return tensor(*args, **options)

    monkeypatch.setattr(torch, "tensor", made)
    for name in ("tolist", "cpu", "numpy"):
        own = getattr(Tensor, name)

        def read(tensor: Tensor, name=name, own=own) -> Any:
            if memory_of(tensor) & gpu.memory:
                gpu.waits.append(name)
            return own(tensor)

        monkeypatch.setattr(Tensor, name, read)
    with engine(tmp_path, family, **layers_of(family, 3)) as llm:
        cache = llm.runner.kv_cache
        gpu.mark(
            [*llm.runner.model.parameters(), llm.runner.model.rope, cache.tensor, cache.states]
        )
        schedule = dummy_step(3, 0, 9, 4, SamplingParams(top_p=0.9))
        for item in dummy_step(2, 8, 9, 4, SamplingParams()).items:
            schedule.add(item)
        if cache.states:
            schedule.moves.state_copies.append((1, 2))
        with gpu:
            llm.runner.launch(schedule)
    assert gpu.waits == [] and "copy_blocks_kernel" in gpu.launches


def variant_of(kernel: Any, args: tuple, options: dict) -> tuple:
    """For what Triton compiles a kernel anew: dtypes, constants, addresses and integers that are multiples of 16, ones."""
    found: list[Any] = [kernel.__name__, *options.items()]
    for name, value in zip(kernel.arg_names, args):
        if isinstance(value, Tensor):
            found.append((value.dtype, value.data_ptr() % 16))
        elif "constexpr" in str(kernel.fn.__annotations__.get(name)):
            found.append(value)
        elif isinstance(value, int) and name not in (kernel.kwargs["do_not_specialize"] or ()):
            found.append((value == 1, value % 16 == 0))
    return tuple(found)


@pytest.mark.parametrize(
    "family, options",
    [
        ("qwen3", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"quantization": "int8"}),
        ("qwen3_5_text", {}),
    ],
)
def test_no_variant_is_new_while_serving(family, options, tmp_path, monkeypatch):
    """Also of products: tiles of many rows begin with 48 tokens, and with 128 for these experts."""
    from triton.runtime.interpreter import InterpretedFunction

    variants = set()

    def run(kernel, *args, grid, warmup, **options):
        variants.add(variant_of(kernel, args, options))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    options |= {"dtype": "float16", "num_blocks": 120, "max_num_seqs": 24}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    with engine(tmp_path, family, options, **sizes) as llm:
        runner = llm.runner
        for schedule in warm_up_steps(torch.device("cuda"), runner.limits, 4, runner.dtype):
            runner.launch(schedule)
        known = {*variants}
        for num_seqs, length in [(1, 200), (1, 50), (1, 48), (3, 16), (16, 1), (3, 1), (2, 9)]:
            schedule = dummy_step(num_seqs, 0, length, 4, SamplingParams(top_p=0.9))
            runner.launch(schedule)
        assert variants == known and len({name for name, *_ in known}) > 5
