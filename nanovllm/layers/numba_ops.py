"""The backend in compiled Python, for a CPU: each kernel does in one pass over memory what PyTorch
does in several.

See ops.py for what the functions do, and numba_kernels.py for the kernels. They are tested in
tests/core/test_ops.py.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.layers import torch_attention, torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.numba_int8 import store_int8_kernel
from nanovllm.layers.numba_kernels import (
    add_and_norm_kernel,
    decode_kernel,
    norm_and_rotate_kernel,
    silu_and_mul_kernel,
    store_kv_kernel,
)
from nanovllm.layers.ops import Norm

NAME = "numba"
CAN_BE_RECORDED = True  # see numba_step.py
IS_COMPILED = True
SMALL = 2**22  # multiplications: with fewer, a second thread is not worth its start
INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
copy_blocks = torch_ops.copy_blocks
sample = torch_ops.sample


class Layout(torch_attention.Layout):
    """The arrays that decodes need.

    PyTorch computes prompts, and chunks of them: for many queries, its matrix products are faster
    than these loops.
    """

    def __init__(self, batch: Batch):
        self.starts = batch.cu_seqlens_q.tolist()
        self.contexts = batch.context_lens.tolist()
        chunks = range(batch.num_decodes, len(self.contexts))
        self.parts = [self.chunk(batch, b) for b in chunks]
        self.arrays = (*map(array, (batch.context_lens, batch.cu_blocks, batch.block_tables)),)
        self.num_keys = sum(self.contexts[: batch.num_decodes])


layout = Layout


def array(tensor: Tensor) -> np.ndarray:
    """The same memory as a numpy array. Of 16-bit numbers, numba knows only integers: see
    numba_kernels.as_float32."""
    tensor = tensor.detach().contiguous()
    integer = INTEGERS.get(tensor.dtype)
    return tensor.numpy() if integer is None else tensor.view(integer).numpy()


@cache
def pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process: a forked process has none of them."""
    return ThreadPoolExecutor(os.cpu_count(), "kernels")


def run(kernel: Callable, arguments: tuple, num_programs: int, work: int) -> None:
    """Runs all programs of a kernel. If there is enough work, on as many threads as PyTorch
    uses."""
    num_threads = min(torch.get_num_threads(), num_programs) if work >= SMALL else 1
    if num_threads <= 1:
        kernel(*arguments, 0, num_programs)
        return
    ends = [num_programs * i // num_threads for i in range(num_threads + 1)]
    (begin, end), *others = pairwise(ends)
    threads = pool(os.getpid())
    running = [threads.submit(kernel, *arguments, *part) for part in others]
    kernel(*arguments, begin, end)
    for one in running:
        one.result()


def store_kv(k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
    keys, values = map(array, batch.kv_cache.layers[layer])
    kernel = store_int8_kernel if keys.dtype == np.int8 else store_kv_kernel
    run(kernel, (keys, values, array(k), array(v), batch.slot_mapping.numpy()), len(k), 0)


def paged_attention(q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
    """Computes attention.paged_attention. Decodes come first in a batch."""
    layout = batch.layout
    assert isinstance(layout, Layout), "batch.layout must be a Layout of this batch"
    out = torch_attention.paged_attention(q, batch, layer, scale)  # its rows of decodes are empty
    num_decodes = batch.num_decodes
    _, num_heads, head_dim = q.shape
    num_kv_heads = batch.kv_cache.num_kv_heads
    if num_decodes:
        # the KV heads of a sequence lie side by side: apart only if threads would have no work
        heads = num_kv_heads if num_decodes >= torch.get_num_threads() else 1
        rows = (out[:num_decodes], q[:num_decodes])
        arrays = map(array, (*rows, *batch.kv_cache.layers[layer]))
        run(
            decode_kernel(head_dim, num_heads // num_kv_heads),
            (*arrays, *layout.arrays, np.float32(scale), heads),
            num_decodes * num_kv_heads // heads,
            2 * layout.num_keys * num_heads * head_dim,
        )
    return out


def add_and_norm(residual: Tensor, x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x)
    arrays = map(array, (out, residual, x, norm.weight))
    run(add_and_norm_kernel, (*arrays, np.float32(norm.eps)), len(x), x.numel())
    return residual, out


def norm_and_rotate(
    qkv: Tensor,
    q_norm: Norm,
    k_norm: Norm,
    cos_sin: Tensor,
    sizes: list[int],
) -> tuple[Tensor, ...]:
    num_tokens, _, head_dim = qkv.shape
    parts = tuple(qkv.new_empty(num_tokens, size, head_dim) for size in sizes)
    q_weight = k_weight = qkv[0, 0]  # of the right type, and not read
    eps = 0.0
    has_norm = q_norm is not None and k_norm is not None
    if q_norm is not None and k_norm is not None:
        q_weight = q_norm.weight
        k_weight = k_norm.weight
        eps = q_norm.eps or 0.0
    arrays = map(array, (*parts, qkv, q_weight, k_weight, cos_sin))
    arguments = (*arrays, np.float32(eps), has_norm)
    run(norm_and_rotate_kernel, arguments, num_tokens, qkv.numel())
    return parts


rotate_and_store = torch_ops.in_two_steps(norm_and_rotate, store_kv)


def silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty(len(x), x.shape[1] // 2)
    run(silu_and_mul_kernel, (array(out), array(x)), len(x), 4 * x.numel())
    return out
