"""The decode of a batch in one call: what a CUDA graph is on a GPU.

`step` is the whole model on a page, in compiled Python. It calls the kernels that numba_ops calls
layer by layer, on memory that was bound once. Each thread runs all of it: it computes its share of
a kernel's programs, and waits for the others where the next kernel reads their numbers.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from nanovllm.layers.numba_kernels import (
    add_and_norm_kernel,
    decode_kernel,
    kernel,
    norm_and_rotate_kernel,
    silu_and_mul_kernel,
)
from nanovllm.layers.numba_run import array, share
from nanovllm.layers.numba_tiles import multiply

LOOKS = 2000  # at the clock of another thread, before it may have the processor


Inputs = namedtuple("Inputs", "ids positions slots contexts cu_blocks block_tables")  # see Batch
Model = namedtuple(
    "Model",
    "embedding rope first_norms qkv q_norms k_norms out second_norms gate_up down last_norm head "
    "cache eps scale",
)
Memory = namedtuple(
    "Memory",
    "residual added cos_sin hidden qkv heads q k v attended flat gate_up middle last logits",
)


class Activations(NamedTuple):
    """The input of a product: a row for each sequence, and the same in integers."""

    x: np.ndarray  # [T, in]
    grouped: np.ndarray  # the same memory [T, groups, group]
    integers: np.ndarray  # [T, groups, group], with zeros behind an odd number of groups
    scales: np.ndarray  # fp32 [T, groups]
    sums: np.ndarray  # int32 [T, groups], of the integers


class Weights(NamedTuple):
    """The weights of one product in all layers. What their form does not have is empty."""

    codes: np.ndarray  # [layers, out, in]; in 4 bits, all three are as numba_lanes.py has them
    scales: np.ndarray  # fp32 [layers, out, groups]
    zeros: np.ndarray  # uint8
    biases: np.ndarray  # [layers, out]


class Form(NamedTuple):
    """How a weight is kept, and the kernels for it."""

    prepare: Callable  # (rows, begin, end): program t makes the integers of row t
    multiply: Callable  # (out, rows, weights, layer, num_rows, begin, end): o is a row of weights
    integers: torch.dtype = torch.int8  # of a row


# --- threads ---


@intrinsic
def set_clock(typing_context, clocks, thread, time):
    """clocks[thread] = time, behind all that this thread has written."""

    def code(context, builder, signature, arguments):
        numbers = context.make_array(clocks)(context, builder, arguments[0])
        own = builder.gep(numbers.data, [arguments[1]])
        builder.store_atomic(arguments[2], own, "release", 8)
        return context.get_dummy_value()

    return types.void(clocks, types.int64, types.int64), code


@intrinsic
def clock_of(typing_context, clocks, thread):
    """clocks[thread], before all that this thread reads next."""

    def code(context, builder, signature, arguments):
        numbers = context.make_array(clocks)(context, builder, arguments[0])
        other = builder.gep(numbers.data, [arguments[1]])
        return builder.load_atomic(other, "acquire", 8)

    return types.int64(clocks, types.int64), code


let_others_run = types.ExternalFunction("sched_yield", types.int32())


@kernel
def wait_for_all(clocks, thread, num_threads):
    """Returns when all threads have called this function as often as this one."""
    time = clocks[thread] + 1
    set_clock(clocks, thread, time)
    for other in range(num_threads):
        looks = 0
        while clock_of(clocks, other) < time:
            looks += 1
            if looks > LOOKS:
                let_others_run()


# --- weights that are not quantized ---


@kernel
def nothing(rows, begin, end):
    """No integers are needed."""


@kernel
def multiply_rows(out, rows, weights, layer, num_rows, begin, end):
    x = rows.x[:num_rows]
    multiply(out, x, weights.codes[layer], weights.biases[layer], begin, end)


PLAIN = Form(nothing, multiply_rows)


# --- the model ---


class Forms(NamedTuple):
    """The form of each product's weights, in all layers."""

    qkv: Form
    out: Form
    gate_up: Form
    down: Form
    head: Form


@cache
def step_kernel(
    head_dim: int, group: int, has_norm: bool, store: Callable, forms: Forms
) -> Callable:
    """The function that each thread runs. It computes memory.last and memory.logits."""
    decode = decode_kernel(head_dim, group)
    prepare_qkv, multiply_qkv, _ = forms.qkv
    prepare_out, multiply_out, _ = forms.out
    prepare_gate_up, multiply_gate_up, _ = forms.gate_up
    prepare_down, multiply_down, _ = forms.down
    prepare_head, multiply_head, _ = forms.head

    @kernel
    def step(inputs, model, memory, clocks, thread, num_threads):
        num_rows = len(inputs.ids)
        kv_heads = memory.k.shape[1]
        parts = kv_heads if num_rows < num_threads else 1
        tokens = share(num_rows, thread, num_threads)
        programs = share(num_rows * parts, thread, num_threads)
        of_qkv = share(memory.qkv.shape[1], thread, num_threads)
        of_size = share(memory.added.shape[1], thread, num_threads)
        of_gate_up = share(memory.gate_up.shape[1], thread, num_threads)
        of_vocabulary = share(memory.logits.shape[1], thread, num_threads)
        residual, added, cos_sin, hidden, qkv, heads, q, k, v, attended, flat = memory[:11]
        gate_up, middle, last, logits = memory[11:]
        eps = model.eps

        for t in range(*tokens):
            for i in range(residual.shape[1]):
                residual[t, i] = model.embedding[inputs.ids[t], i]
                added[t, i] = 0
            for i in range(head_dim):
                cos_sin[t, i] = model.rope[inputs.positions[t], i]
        for i in range(len(model.first_norms)):
            add_and_norm_kernel(hidden.x, residual, added, model.first_norms[i], eps, *tokens)
            prepare_qkv(hidden, *tokens)
            wait_for_all(clocks, thread, num_threads)
            multiply_qkv(qkv, hidden, model.qkv, i, num_rows, *of_qkv)
            wait_for_all(clocks, thread, num_threads)
            norms = (model.q_norms[i], model.k_norms[i])
            norm_and_rotate_kernel(q, k, v, heads, *norms, cos_sin, eps, has_norm, *tokens)
            keys = model.cache[0, i]
            values = model.cache[1, i]
            store(keys, values, k, v, inputs.slots, *tokens)
            wait_for_all(clocks, thread, num_threads)
            where = (inputs.contexts, inputs.cu_blocks, inputs.block_tables)
            decode(attended, q, keys, values, *where, model.scale, kv_heads // parts, *programs)
            wait_for_all(clocks, thread, num_threads)
            prepare_out(flat, *tokens)
            wait_for_all(clocks, thread, num_threads)
            multiply_out(added, flat, model.out, i, num_rows, *of_size)
            wait_for_all(clocks, thread, num_threads)
            add_and_norm_kernel(hidden.x, residual, added, model.second_norms[i], eps, *tokens)
            prepare_gate_up(hidden, *tokens)
            wait_for_all(clocks, thread, num_threads)
            multiply_gate_up(gate_up, hidden, model.gate_up, i, num_rows, *of_gate_up)
            wait_for_all(clocks, thread, num_threads)
            silu_and_mul_kernel(middle.x, gate_up, *tokens)
            prepare_down(middle, *tokens)
            wait_for_all(clocks, thread, num_threads)
            multiply_down(added, middle, model.down, i, num_rows, *of_size)
            wait_for_all(clocks, thread, num_threads)
        add_and_norm_kernel(last.x, residual, added, model.last_norm, eps, *tokens)
        prepare_head(last, *tokens)
        wait_for_all(clocks, thread, num_threads)
        multiply_head(logits, last, model.head, 0, num_rows, *of_vocabulary)

    return step


def new_rows(x: Tensor, form: Form, group: int) -> Activations:
    """Memory for the input of a product, whose numbers are in x [T, in]. `group` numbers share a
    scale."""
    grouped = x.view(len(x), -1, group)
    num_groups = grouped.shape[1] + grouped.shape[1] % 2
    integers = torch.zeros(len(x), num_groups, group, dtype=form.integers)
    scales = torch.zeros(len(x), num_groups)
    return Activations(*map(array, (x, grouped, integers, scales, scales.int())))
