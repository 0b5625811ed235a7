"""Memory: the KV cache, how many blocks it may have, and what the C library does with freed memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanovllm.config import Config
from nanovllm.host_cache import STAGED_BYTES
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request

if TYPE_CHECKING:
    from nanovllm.model_runner import ModelRunner


def keep_freed_memory() -> None:
    """glibc returns large freed tensors to the system at once, so the next step must fault all their pages in again."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: keep up to 1 GiB of free memory
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: 32 MiB is the maximum


@dataclass(frozen=True)
class CacheShape:
    """The shape of a KV cache with any number of blocks."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, with the keys and values of all layers."""
        return (
            2
            * self.num_layers
            * self.block_size
            * self.num_kv_heads
            * self.head_dim
            * self.dtype.itemsize
        )

    def new_cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """[2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values. Zeros, so that reading a
        slot that was never written gives the same wrong result every time."""
        shape = (2, self.num_layers, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        if (
            device.type == "cpu"
        ):  # anonymous pages are zero and take no memory until they are touched
            buffer = mmap.mmap(-1, num_blocks * self.block_bytes)
            return torch.frombuffer(buffer, dtype=self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=device)


# --- how many blocks: measured by trial runs on a cache of one block ---


def num_blocks_that_fit(runner: ModelRunner, config: Config) -> int:
    """Divides the memory that the model leaves into blocks."""
    is_cuda = runner.device.type == "cuda"
    available = memory_left(runner, config) if is_cuda else int(config.kv_cache_gib * 2**30)
    size = runner.shape.block_bytes
    num_blocks = min(available // size, runner.num_useful_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"no memory is left for a KV block of {size:,} bytes: {available:,} bytes are available"
        )
    return num_blocks


def memory_left(runner: ModelRunner, config: Config) -> int:
    """Bytes of GPU memory that are left for the KV cache."""
    device = runner.device
    runner.kv_cache = runner.shape.new_cache(1, device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(runner)
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
    others = (
        total - free_memory(device) - torch.cuda.memory_reserved(device)
    )  # other processes, CUDA's own context
    graphs = graph_memory(runner) if runner.has_graphs else 0
    staged = STAGED_BYTES if config.preemption_mode == "swap" else 0
    del runner.kv_cache
    return int(total * config.gpu_memory_utilization) - others - peak - graphs - staged


def graph_memory(runner: ModelRunner) -> int:
    """Bytes that the CUDA graphs will take: the largest has the activations, the others about the same small amount."""
    graphs, free = runner.new_graphs(), [free_memory(runner.device)]
    for size in (graphs.sizes[-1], graphs.sizes[0]):
        graphs.record(size)
        free.append(free_memory(runner.device))
    largest, another = free[0] - free[1], free[1] - free[2]
    return largest + another * (len(graphs.sizes) - 1)


def free_memory(device: torch.device) -> int:
    """Bytes that nobody holds. What PyTorch keeps for later is given back first: a recording does that, too, and it would
    look as if the recording had made memory."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def run_largest_step(runner: ModelRunner) -> None:
    """The largest possible, to measure the memory of activations and sampling."""
    limits = runner.limits
    num_tokens = limits.max_num_batched_tokens
    num_seqs = max(min(limits.max_num_seqs, num_tokens), -(-num_tokens // limits.max_model_len))
    run_dummy_step(runner, num_seqs, num_tokens // num_seqs, 0, SamplingParams(top_p=0.9))


def warm_up(runner: ModelRunner) -> None:
    """Launches each kernel in every variant that serving can need, so that none is compiled while requests wait: a chunk
    of a prompt, tokens that are drawn, copied blocks, and a decode with contexts of many lengths, which decide into how
    many parts they are cut. More sequences mean fewer parts."""
    run_dummy_step(runner, 1, 2, 0, SamplingParams())
    longest = min(runner.limits.max_model_len, 8192)
    for length in [*(2**i for i in range(14) if 2**i < longest), longest]:
        run_dummy_step(runner, 1, length, length - 1, SamplingParams())


def run_dummy_step(
    runner: ModelRunner, num_seqs: int, length: int, num_computed: int, params: SamplingParams
) -> None:
    """Sequences of `length` tokens, of which so many are computed already. All their blocks are the first one."""
    seqs = [Request("", None, [0] * length, params).sequences[0] for _ in range(num_seqs)]
    for seq in seqs:
        seq.num_computed_tokens, seq.block_table = (
            num_computed,
            [0] * -(-length // runner.shape.block_size),
        )
    schedule = Schedule()
    for seq in seqs:
        schedule.add(Item(seq, num_computed, length - num_computed))
    schedule.moves.copies.append((0, 0))
    runner.run(schedule)
