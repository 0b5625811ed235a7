"""The backend in compiled Python, for a CPU: each kernel does in one pass over memory what PyTorch
does in several.

See ops.py for what the functions do, and numba_kernels.py for the kernels. They are tested in
tests/core/test_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.backends import torch_ops
from nanovllm.layers import torch_attention
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.numba_int8 import store_int8_kernel
from nanovllm.layers.numba_kernels import (
    add_and_norm_kernel,
    decode_kernel,
    norm_and_rotate_kernel,
    silu_and_mul_kernel,
    store_kv_kernel,
)
from nanovllm.layers.numba_run import array, run
from nanovllm.layers.numba_tiles import FEW, are_fastest, multiply
from nanovllm.layers.ops import Norm

if TYPE_CHECKING:
    from nanovllm.backends.numba_graphs import NumbaStep
    from nanovllm.layers.experts import Pairs

NAME = "numba"
COMPILES_AT_FIRST_USE = True
copy_blocks = torch_ops.copy_blocks
sample = torch_ops.sample
cache_shape = torch_ops.cache_shape
experts = torch_ops.experts


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


def in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes F.linear."""
    out = x.new_empty(len(x), len(weight))
    biases = np.zeros(len(weight), np.float32) if bias is None else array(bias)
    arguments = (*map(array, (out, x, weight)), biases)
    run(multiply, arguments, len(weight), len(x) * weight.numel())
    return out


def product_for(dtype: torch.dtype) -> Callable:
    return in_tiles if are_fastest(dtype) else torch_ops.product_for(dtype)


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


def recorder(model: Any, kv_cache: KVCache, limits: Any) -> NumbaStep | None:
    from nanovllm.backends.numba_graphs import bind  # chapter 11

    return bind(model, kv_cache, limits.max_num_seqs)


def grouped_product(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    from nanovllm.layers.experts import each_expert  # chapter 05

    of_many = product_for(x.dtype)

    def multiply(rows: Tensor, expert: int) -> Tensor:
        product = in_tiles if len(rows) <= FEW else of_many
        return product(rows, matrices[expert], None)

    return each_expert(x, pairs, multiply)


def quantized_product(weight: Groups, num_experts: int | None) -> Quantized:
    from nanovllm.topics.quantization.numba_product import product_of  # chapter 21

    return product_of(weight, num_experts)


def delta_rule(*inputs: Any) -> Tensor:
    from nanovllm.topics.hybrid.delta import delta_layer  # chapter 23
    from nanovllm.topics.hybrid.numba_delta import decode

    return delta_layer(decode, *inputs)
