"""Attention in compiled Python: attention.py for a CPU, as plain loops over numbers.

numba compiles the kernels for the processor that there is. With NUMBA_DISABLE_JIT=1, Python runs
them as they stand: slowly, but a print or a debugger shows each number. As in triton_attention.py,
a program goes through the context of one sequence in tiles of keys, to which the block table leads,
and its softmax is online. Nothing is gathered.

What is a grid on a GPU is a range of programs here, from `begin` to `end`: each of a few threads
gets one, see `run`. A program's sums do not depend on what is beside it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from nanovllm.layers import torch_attention
from nanovllm.layers.batch import Batch

KEYS = 16  # of a tile
SMALL = 2**22  # multiplications: with fewer, a second thread is not worth its start
ZERO = np.float32(0)
ONE = np.float32(1)
MINUS_INFINITY = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)

# sums may be reordered, so that they are vectorized; infinities and NaN stay what they are
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
inlined = njit(inline="always")


def kernel(function: Callable) -> Callable:
    """Compiled where it is first called with arrays of these types, and kept on disk."""
    try:
        return njit(nogil=True, fastmath=FAST_MATH, cache=True)(function)
    except RuntimeError:  # there is no folder that can be written to
        return njit(nogil=True, fastmath=FAST_MATH)(function)


# --- numbers ---


@inlined
def of_bfloat16(bits):
    """A bfloat16 is the upper half of a float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def to_bfloat16(x):
    """Rounds to the nearest one, or of two to the even one."""
    bits = np.float32(x).view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))


def as_float32(x):
    """The number: a uint16 has the bits of a bfloat16."""
    return of_bfloat16(x) if isinstance(x, np.uint16) else x


@overload(as_float32)
def _(x):
    return (lambda x: of_bfloat16(x)) if x == types.uint16 else (lambda x: x)


def rounded(x, like):
    """The float32 as a number of the same type as the other one."""
    return to_bfloat16(x) if isinstance(like, np.uint16) else x


@overload(rounded)
def _(x, like):
    return (lambda x, like: to_bfloat16(x)) if like == types.uint16 else (lambda x, like: x)


@inlined
def exp(x):
    """e to the power of x, to 4e-6 of it; 1e-38 if that is less. Unlike np.exp, it is vectorized:
    2 to the power of an integer is an exponent, and that of the rest a polynomial."""
    power = max(x * LOG2_E, np.float32(-126))
    whole = np.floor(power + np.float32(0.5))
    rest = (power - whole) * LN_2
    result = np.float32(1 / 5040)
    result = result * rest + np.float32(1 / 720)
    result = result * rest + np.float32(1 / 120)
    result = result * rest + np.float32(1 / 24)
    result = result * rest + np.float32(1 / 6)
    result = result * rest + np.float32(1 / 2)
    result = result * rest + ONE
    result = result * rest + ONE
    exponent = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return result * np.int32(exponent).view(np.float32)


# --- kernels ---


@kernel
def store_kv_kernel(k_cache, v_cache, k, v, slots, begin, end):
    """Program t copies the key and value of token t into its slot."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    for t in range(begin, end):
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for head in range(num_kv_heads):
            for i in range(head_dim):
                k_cache[block, offset, head, i] = k[t, head, i]
                v_cache[block, offset, head, i] = v[t, head, i]


@cache
def decode_kernel(HEAD_DIM: int, GROUP: int) -> Callable:
    """Compiled for heads of this size, and this many query heads for each KV head."""

    @kernel
    def decode(
        out,  # [B, num_heads, HEAD_DIM], and so is q
        q,
        keys,  # [num_blocks, block_size, num_kv_heads, HEAD_DIM], and so are values
        values,
        context_lens,
        cu_blocks,
        block_tables,
        scale,
        heads,  # KV heads of a program: all, or 1
        begin,
        end,
    ):
        """Program (sequence, KV heads): the last token of a sequence over its whole context."""
        block_size, num_kv_heads, _ = keys.shape[1:]
        parts = num_kv_heads // heads
        num_rows = heads * GROUP
        result = np.empty((num_rows, HEAD_DIM), np.float32)
        maximum = np.empty(num_rows, np.float32)
        total = np.empty(num_rows, np.float32)
        scores = np.empty(KEYS, np.float32)
        for program in range(begin, end):
            seq = program // parts
            first_head = program % parts * num_rows
            context = context_lens[seq]
            result[:] = 0
            maximum[:] = -np.inf
            total[:] = 0
            for at in range(0, context, block_size):
                block = block_tables[cu_blocks[seq] + at // block_size]
                last = min(block_size, context - at) - 1
                for first in range(0, last + 1, KEYS):
                    for row in range(num_rows):
                        head = first_head + row
                        kv_head = head // GROUP
                        # four keys at a time: their sums are independent. The last one stands in
                        # for those behind it, which the mask hides
                        for i in range(0, KEYS, 4):
                            i0 = min(first + i, last)
                            i1 = min(first + i + 1, last)
                            i2 = min(first + i + 2, last)
                            i3 = min(first + i + 3, last)
                            s0 = s1 = s2 = s3 = ZERO
                            for d in range(HEAD_DIM):
                                x = as_float32(q[seq, head, d])
                                s0 += x * as_float32(keys[block, i0, kv_head, d])
                                s1 += x * as_float32(keys[block, i1, kv_head, d])
                                s2 += x * as_float32(keys[block, i2, kv_head, d])
                                s3 += x * as_float32(keys[block, i3, kv_head, d])
                            scores[i] = s0
                            scores[i + 1] = s1
                            scores[i + 2] = s2
                            scores[i + 3] = s3
                        new_maximum = maximum[row]
                        for i in range(KEYS):
                            score = scores[i] * scale if first + i <= last else MINUS_INFINITY
                            scores[i] = score
                            new_maximum = max(new_maximum, score)

                        # what was summed up so far shrinks if a larger score has come
                        shrink = exp(maximum[row] - new_maximum)
                        maximum[row] = new_maximum
                        weights = ZERO
                        for i in range(KEYS):
                            weight = exp(scores[i] - new_maximum)
                            scores[i] = weight
                            weights += weight
                        total[row] = total[row] * shrink + weights
                        for d in range(HEAD_DIM):
                            result[row, d] *= shrink
                        for i in range(0, KEYS, 4):
                            i0 = min(first + i, last)
                            i1 = min(first + i + 1, last)
                            i2 = min(first + i + 2, last)
                            i3 = min(first + i + 3, last)
                            for d in range(HEAD_DIM):
                                v0 = scores[i] * as_float32(values[block, i0, kv_head, d])
                                v1 = scores[i + 1] * as_float32(values[block, i1, kv_head, d])
                                v2 = scores[i + 2] * as_float32(values[block, i2, kv_head, d])
                                v3 = scores[i + 3] * as_float32(values[block, i3, kv_head, d])
                                result[row, d] += (v0 + v1) + (v2 + v3)
            for row in range(num_rows):
                head = first_head + row
                for d in range(HEAD_DIM):
                    out[seq, head, d] = rounded(result[row, d] / total[row], out[seq, head, d])

    return decode


# --- launching them ---


class Layout(torch_attention.Layout):
    """Decodes need no more than these arrays. PyTorch computes prompts, and chunks of them: for
    many queries, its products of matrices are faster than these loops."""

    def __init__(self, batch: Batch):
        self.starts = batch.cu_seqlens_q.tolist()
        self.contexts = batch.context_lens.tolist()
        chunks = range(batch.num_decodes, len(self.contexts))
        self.parts = [self.chunk(batch, b) for b in chunks]
        self.arrays = (*map(array, (batch.context_lens, batch.cu_blocks, batch.block_tables)),)
        self.num_keys = sum(self.contexts[: batch.num_decodes])


layout = Layout


def array(tensor: Tensor) -> np.ndarray:
    """The same memory. numba knows no bfloat16: its bits are a uint16."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


@cache
def pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork takes none along."""
    return ThreadPoolExecutor(os.cpu_count(), "kernels")


def run(kernel: Callable, arguments: tuple, num_programs: int, work: int) -> None:
    """Runs all programs of a kernel, on as many threads as PyTorch uses if there is enough work."""
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
    run(store_kv_kernel, (keys, values, array(k), array(v), batch.slot_mapping.numpy()), len(k), 0)


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
        rows = (array(out[:num_decodes]), array(q[:num_decodes]))
        cache = map(array, batch.kv_cache.layers[layer])
        run(
            decode_kernel(head_dim, num_heads // num_kv_heads),
            (*rows, *cache, *layout.arrays, np.float32(scale), heads),
            num_decodes * num_kv_heads // heads,
            2 * layout.num_keys * num_heads * head_dim,
        )
    return out
