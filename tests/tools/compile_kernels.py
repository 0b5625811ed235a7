"""Compiles the kernels for a GPU that need not be there, with what Triton is told when the engine launches them.

Sizes are Qwen3-0.6B's. It needs ptxas, which Triton brings.

Tests import this file. An example that does: pytest tests/core/test_kernels.py --slow -k ahead_of_time
"""

import re
import subprocess
import tempfile
from contextlib import ExitStack
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nanovllm.backends import triton_ops
from nanovllm.layers import (
    triton_attention,
    triton_delta,
    triton_experts,
    triton_int8,
    triton_plan,
    triton_products,
    triton_sampler,
)
from nanovllm.layers.batch import Batch
from nanovllm.layers.experts import Pairs
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.sampler import Sampling
from nanovllm.topics.hybrid.delta import StateBatch
from nanovllm.topics.quantization import triton_product
from nanovllm.topics.quantization.groups import Groups

KV_HEADS = 8
HIDDEN = 1024
VOCAB = 151_936
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a program may use
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
POINTERS |= {torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8"}

empty = partial(torch.empty, device="meta")  # it has a shape and no memory
ints = partial(empty, dtype=torch.int32)
longs = partial(empty, dtype=torch.int64)


class Launch(NamedTuple):
    """A kernel with the arguments that the engine gives it."""

    name: str
    kernel: Any
    args: tuple
    options: dict  # warps and stages


class Resources(NamedTuple):
    """What a compiled kernel takes."""

    shared: int  # bytes
    spilled: int  # bytes
    registers: int
    buffers: int  # for tiles of keys and values


class Noted:
    """In place of a kernel: it is not launched, but what it is given is kept."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple):
        return self.note

    def note(self, *args, **options) -> None:
        name = self.kernel.__name__.removesuffix("_kernel")
        constants = dict(zip(self.kernel.arg_names, args))
        if name == "attention":
            is_int8 = "_int8" * (constants["k_cache"].dtype == torch.int8)
            names = [launch.name for launch in self.launches]
            name = ("prefill" if f"decode{is_int8}" in names else "decode") + is_int8
        if name == "rotate_and_store":
            name += "_int8" * (constants["k_cache"].dtype == torch.int8)
        if constants.get("VALUES") == 8 or (name == "convolve" and constants["TOKENS"] > 1):
            name += "_of_prompts"
        if name == "product":
            name = "grouped_" * (constants["EXPERTS"] > 0) + f"{name}_{constants['BITS']}_bits"
        self.launches.append(Launch(name, self.kernel, args, options))


def launches_of(head_dim: int, group: int, dtype: torch.dtype, is_whole: bool) -> list[Launch]:
    """Every kernel of the engine, or only those of attention, as they are launched for a model."""
    half = partial(empty, dtype=dtype)
    launches: list[Launch] = []
    with ExitStack() as stack:
        modules = (
            triton_attention,
            triton_plan,
            triton_int8,
            triton_ops,
            triton_sampler,
            triton_products,
            triton_experts,
        )
        modules += (triton_delta,)
        for module in modules:
            for name, kernel in [*vars(module).items()]:
                if name.endswith("_kernel"):
                    noted = Noted(kernel, launches)
                    stack.enter_context(mock.patch.object(module, name, noted))
        launch_attention(head_dim, group, half, half(2, 1, 100, 16, KV_HEADS, head_dim))
        if is_whole:
            codes = empty(2, 1, 100, 16, KV_HEADS, head_dim + 4, dtype=torch.int8)
            launch_attention(head_dim, group, half, codes)
            launch_layers(half)
            launch_products(half)
            launch_experts(half)
            launch_delta(half)
    return launches


def launch_attention(head_dim: int, group: int, half: Any, cache: Tensor) -> None:
    """For 32 decodes, whose contexts are whole or cut into parts, and for a chunk behind them; with the kernels that store."""
    batch = Batch(
        kv_cache=KVCache(cache),
        slot_mapping=longs(96),
        cu_seqlens_q=ints(34),
        context_lens=ints(33),
        cu_blocks=ints(34),
        block_tables=ints(99),
        num_decodes=32,
    )
    norms = [torch.nn.RMSNorm(head_dim, 1e-6, device="meta", dtype=half.keywords["dtype"])] * 2
    heads = [KV_HEADS * group, KV_HEADS, KV_HEADS]
    qkv = half(96, sum(heads), head_dim)
    triton_ops.rotate_and_store(qkv, (norms[0], norms[1]), empty(96, head_dim), heads, batch, 0)
    batch.layout = {}
    with mock.patch.object(triton_plan, "share_of", lambda *args: 66):  # an H100's
        triton_attention.paged_attention(half(96, KV_HEADS * group, head_dim), batch, 0, 0.1)
    triton_attention.copy_blocks(batch.kv_cache, longs(1, 2))


def launch_layers(half: Any) -> None:
    """The small layers, and the sampler."""
    norm = torch.nn.RMSNorm(HIDDEN, 1e-6, device="meta", dtype=half.keywords["dtype"])
    triton_ops.add_and_norm(half(96, HIDDEN), half(96, HIDDEN), norm)
    triton_ops.silu_and_mul(half(96, 6 * HIDDEN))
    sampling = Sampling(empty(32), seed=longs(32), position=longs(32), top_p=empty(32))
    triton_ops.sample(half(32, VOCAB), sampling)


def launch_products(half: Any) -> None:
    """With weights in groups of 128 numbers in 4 bits, and in rows of 8 bits; few rows of activations and many."""
    codes, scales = empty(VOCAB, HIDDEN // 256, 128, dtype=torch.uint8), empty(VOCAB, HIDDEN // 128)
    zeros = empty(scales.shape, dtype=torch.uint8)
    rows = empty(VOCAB, 1, HIDDEN, dtype=torch.int8)
    for weight in (Groups(codes, scales, zeros), Groups(rows, empty(VOCAB, 1), None)):
        triton_product.product(half(16, HIDDEN), weight)
        triton_product.product(half(96, HIDDEN), weight)


def launch_experts(half: Any) -> None:
    """16 tokens in Qwen3-30B-A3B, whose experts have 1,536 x 2,048 numbers."""
    pairs = Pairs(longs(128), longs(128), 8)  # as many as experts
    triton_experts.choose(half(16, 128), 8, True)
    triton_experts.add_up(half(128, 2048), empty(16, 8))
    x, num_out, num_in = half(16, 2048), 1536, 2048
    triton_ops.grouped_product(x, half(128, num_out, num_in), pairs)
    codes, scales = (
        empty(128 * num_out, num_in // 256, 128, dtype=torch.uint8),
        empty(128 * num_out, 16),
    )
    zeros = empty(scales.shape, dtype=torch.uint8)
    triton_product.product(x, Groups(codes, scales, zeros), pairs)
    rows = empty(128 * num_out, 1, num_in, dtype=torch.int8)
    triton_product.product(x, Groups(rows, empty(128 * num_out, 1), None), pairs)


def launch_delta(half: Any) -> None:
    """Sizes are Qwen3.5-0.8B's: 16 heads of 128 numbers, and channels for q, k and v; decodes, and prompts."""
    num_values, channels = 16 * 128, 3 * 16 * 128
    layer = SimpleNamespace(index=0, key_sizes=(16, 128), sizes=[channels, num_values])
    layer.conv1d = SimpleNamespace(weight=empty(channels, 1, 4))
    layer.A_log = layer.dt_bias = empty(16)
    layer.norm = SimpleNamespace(weight=empty(128), eps=1e-6)
    cache: Any = SimpleNamespace(states=[empty(1, 33, 3, channels), empty(1, 33, 16, 128, 128)])
    for num_decodes in (32, 0):
        slots = {"state_slots": longs(32), "num_decodes": num_decodes, "width": 3}
        lengths = (ints(33), ints(32), ints(33))
        batch = StateBatch(cache, longs(32), *lengths, block_tables=ints(9), **slots)
        triton_delta.delta_layer(layer, half(32, channels + num_values), half(32, 32), batch)


def compiled(launch: Launch, capability: int) -> Any:
    """As the JIT does it: it also looks which numbers are multiples of 16, as all addresses are."""
    signature = {}
    constants = {}
    attributes = {}
    for i, (param, value) in enumerate(zip(launch.kernel.params, launch.args)):
        signature[param.name] = "fp32" if isinstance(value, float) else "i32"
        is_aligned = isinstance(value, int) and value % 16 == 0 and not param.do_not_specialize
        if isinstance(value, Tensor):
            signature[param.name] = POINTERS[value.dtype]
            is_aligned = True
        if param.is_constexpr:
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif is_aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch.options)


def resources_of(launch: Launch, capability: int) -> Resources:
    """What ptxas says of a kernel."""
    kernel = compiled(launch, capability)
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = re.search(r"\.target (sm_\w+)", ptx)[1]
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores = re.search(r"(\d+) bytes spill stores", report)[1]
    registers = re.search(r"Used (\d+) registers", report)[1]
    buffers = re.findall(r"local_alloc : .*memdesc<(\d+)x\d+x\d+x", kernel.asm["ttgir"])
    most_buffers = max(map(int, buffers), default=0)
    return Resources(kernel.metadata.shared, int(stores), int(registers), most_buffers)


def ptxas_problem(capability: int) -> str | None:
    """Why nothing can be compiled for this GPU here, or None."""
    try:
        get_ptxas(capability)
    except RuntimeError as error:
        return f"needs ptxas: {error}"
    return None


def all_resources(
    capability: int = 80,
    head_dim: int = 128,
    group: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    is_whole: bool = True,
) -> dict:
    """Of each kernel, by its name."""
    sizes = triton_plan.tile_sizes
    is_old = capability < 80
    of_gpu = partial(sizes, is_old=is_old)
    numbers = triton_products.NUMBERS
    if is_old:
        numbers = dict.fromkeys(numbers, triton_products.FEW_NUMBERS)
    with (
        mock.patch.object(triton_plan, "tile_sizes", lambda *args: of_gpu(*args[:5])),
        mock.patch.object(triton_products, "NUMBERS", numbers),
    ):
        launches = launches_of(head_dim, group, dtype, is_whole)
    return {launch.name: resources_of(launch, capability)._asdict() for launch in launches}


def problems(
    capability: int, heads: list[int], groups: list[int], dtypes: list[torch.dtype]
) -> list[str]:
    """The kernels of attention that need too much shared memory, or that spill registers."""
    found = []
    for dtype, head_dim, group in product(dtypes, heads, groups):
        for name, needs in all_resources(capability, head_dim, group, dtype, False).items():
            if needs["shared"] > SHARED[capability] * 1024 or needs["spilled"]:
                found.append(f"sm_{capability} {name}, {dtype}, {head_dim}, {group}: {needs}")
    return found
