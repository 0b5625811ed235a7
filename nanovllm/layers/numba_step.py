"""The decode of a few sequences in one call: what a CUDA graph is on a GPU.

`step` is the whole model on a page, in compiled Python. It calls the kernels that numba_ops calls
layer by layer, on memory that was bound once. Each thread runs all of it: it computes its share of
a kernel's programs, and waits for the others where the next kernel reads their numbers.
"""

import logging
import os
from collections import namedtuple
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor, nn

from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.linear import Linear
from nanovllm.layers.numba_int8 import store_int8_kernel
from nanovllm.layers.numba_kernels import (
    ZERO,
    add_and_norm_kernel,
    as_float32,
    decode_kernel,
    inlined,
    kernel,
    norm_and_rotate_kernel,
    rounded,
    silu_and_mul_kernel,
    store_kv_kernel,
)
from nanovllm.layers.numba_ops import SMALL, array
from nanovllm.models.dense import DenseModel
from nanovllm.step import StepInputs

logger = logging.getLogger(__name__)

FEW = 4  # sequences: with more, oneDNN's products are worth the calls between them
MOST_COPIED = 2**30  # bytes of weights that are kept in two forms
LOOKS = 2000  # at the clock of another thread, before it may have the processor
NEVER = 2**62


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


class Rows(NamedTuple):
    """The input of a product: a row for each sequence, and the same in integers."""

    x: np.ndarray  # [T, in]
    grouped: np.ndarray  # the same memory [T, groups, group]
    integers: np.ndarray  # int16 [T, groups, group], with zeros behind an odd number of groups
    scales: np.ndarray  # fp32 [T, groups]
    sums: np.ndarray  # int32 [T, groups], of the integers


class Weights(NamedTuple):
    """The weights of one product in all layers. What their form does not have is empty."""

    codes: np.ndarray  # [layers, out, in], with 4 bits [layers, out, pairs of groups, group]
    scales: np.ndarray  # fp32 [layers, out, groups]
    zeros: np.ndarray  # uint8 [layers, out, groups]
    biases: np.ndarray  # [layers, out]


class Form(NamedTuple):
    """How a weight is kept, and the kernels for it."""

    prepare: Callable  # (rows, begin, end): program t makes the integers of row t
    multiply: Callable  # (out, rows, weights, layer, num_rows, begin, end): o is a row of weights
    group: int = 0  # the numbers of a row that share a scale; 0: all


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
def wait_for_all(clocks, thread):
    """Returns when all threads have called this function as often as this one."""
    time = clocks[thread] + 1
    set_clock(clocks, thread, time)
    for other in range(len(clocks)):
        looks = 0
        while clock_of(clocks, other) < time:
            looks += 1
            if looks > LOOKS:
                let_others_run()


@inlined
def share(num_programs, thread, num_threads):
    """Of the programs: those of this thread."""
    return num_programs * thread // num_threads, num_programs * (thread + 1) // num_threads


# --- weights that are not quantized ---


@kernel
def nothing(rows, begin, end):
    """No integers are needed."""


@kernel
def multiply(out, rows, weights, layer, num_rows, begin, end):
    weight = weights.codes[layer]
    biases = weights.biases[layer]
    for o in range(begin, end):
        for t in range(num_rows):
            total = ZERO
            for i in range(weight.shape[1]):
                total += as_float32(rows.x[t, i]) * as_float32(weight[o, i])
            if len(biases):
                total += as_float32(biases[o])
            out[t, o] = rounded(total, out[t, o])


PLAIN = Form(nothing, multiply)
NOTHING = (torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.uint8))  # scales and zeros


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
    def step(inputs, model, memory, clocks, thread):
        num_threads = len(clocks)
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
            wait_for_all(clocks, thread)
            multiply_qkv(qkv, hidden, model.qkv, i, num_rows, *of_qkv)
            wait_for_all(clocks, thread)
            norms = (model.q_norms[i], model.k_norms[i])
            norm_and_rotate_kernel(q, k, v, heads, *norms, cos_sin, eps, has_norm, *tokens)
            keys = model.cache[0, i]
            values = model.cache[1, i]
            store(keys, values, k, v, inputs.slots, *tokens)
            wait_for_all(clocks, thread)
            where = (inputs.contexts, inputs.cu_blocks, inputs.block_tables)
            decode(attended, q, keys, values, *where, model.scale, kv_heads // parts, *programs)
            wait_for_all(clocks, thread)
            prepare_out(flat, *tokens)
            wait_for_all(clocks, thread)
            multiply_out(added, flat, model.out, i, num_rows, *of_size)
            wait_for_all(clocks, thread)
            add_and_norm_kernel(hidden.x, residual, added, model.second_norms[i], eps, *tokens)
            prepare_gate_up(hidden, *tokens)
            wait_for_all(clocks, thread)
            multiply_gate_up(gate_up, hidden, model.gate_up, i, num_rows, *of_gate_up)
            wait_for_all(clocks, thread)
            silu_and_mul_kernel(middle.x, gate_up, *tokens)
            prepare_down(middle, *tokens)
            wait_for_all(clocks, thread)
            multiply_down(added, middle, model.down, i, num_rows, *of_size)
            wait_for_all(clocks, thread)
        add_and_norm_kernel(last.x, residual, added, model.last_norm, eps, *tokens)
        prepare_head(last, *tokens)
        wait_for_all(clocks, thread)
        multiply_head(logits, last, model.head, 0, num_rows, *of_vocabulary)

    return step


class NumbaStep:
    """A model, bound to its weights and its cache. Its methods are those of StepGraphs."""

    sizes = (FEW,)  # one function serves all numbers of sequences up to this one

    def __init__(self, model: DenseModel, kv_cache: KVCache, forms: Forms):
        self.hooks = [module._forward_hooks for module in model.modules()]
        self.hooks += [module._forward_pre_hooks for module in model.modules()]
        self.pool: ThreadPoolExecutor | None = None
        self.process = 0  # whose threads the pool has
        decoder = model.model
        attention = decoder.layers[0].self_attn
        embedding = decoder.embed_tokens.weight
        weights = partial(weights_of, decoder.layers)
        norms = partial(norms_of, decoder.layers)
        self.model = Model(
            embedding=array(embedding),
            rope=array(model.rope),
            first_norms=norms("input_layernorm"),
            qkv=weights("self_attn.qkv_proj"),
            q_norms=norms("self_attn.q_norm"),
            k_norms=norms("self_attn.k_norm"),
            out=weights("self_attn.o_proj"),
            second_norms=norms("post_attention_layernorm"),
            gate_up=weights("mlp.gate_up_proj"),
            down=weights("mlp.down_proj"),
            last_norm=array(decoder.norm.weight),
            head=weights_of([model], "lm_head", embedding if has_tied_head(model) else None),
            cache=array(kv_cache.tensor),
            eps=np.float32(decoder.norm.eps),
            scale=np.float32(attention.scale),
        )
        num_heads, kv_heads, _ = attention.sizes
        head_dim = attention.head_dim
        self.step = step_kernel(
            head_dim,
            num_heads // kv_heads,
            attention.q_norm is not None,
            store_int8_kernel if kv_cache.tensor.dtype == torch.int8 else store_kv_kernel,
            forms,
        )
        # the numbers of a step, which the next one overwrites
        new = partial(decoder.norm.weight.new_zeros, FEW)
        size = len(decoder.norm.weight)
        middle = decoder.layers[0].mlp.down_proj.weight.shape[1]
        heads = new(num_heads + 2 * kv_heads, head_dim)
        attended = new(num_heads, head_dim)
        self.last = new(size)
        self.logits = new(model.lm_head.weight.shape[0])
        self.memory = Memory(
            residual=array(new(size)),
            added=array(new(size)),
            cos_sin=array(new(head_dim).float()),
            hidden=new_rows(new(size), forms.qkv),
            qkv=array(heads.flatten(1)),
            heads=array(heads),
            q=array(new(num_heads, head_dim)),
            k=array(new(kv_heads, head_dim)),
            v=array(new(kv_heads, head_dim)),
            attended=array(attended),
            flat=new_rows(attended.flatten(1), forms.out),
            gate_up=array(new(2 * middle)),
            middle=new_rows(new(middle), forms.down),
            last=new_rows(self.last, forms.head),
            logits=array(self.logits),
        )

    def record(self, size: int) -> None:
        """Compiles the function: runs it for one sequence, in the first block."""
        zero = np.zeros(1, np.int32)
        number = np.zeros(1, np.int64)
        self._call(Inputs(number, number, number, zero + 1, np.zeros(2, np.int32), zero))

    def size_for(self, step: StepInputs) -> int | None:
        """The number of sequences; None if another way must compute the step: it has chunks, or
        somebody looks at a layer."""
        num_seqs = len(step.batch.context_lens)
        has_chunks = step.batch.num_decodes < num_seqs
        return None if has_chunks or num_seqs > FEW or any(self.hooks) else num_seqs

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step with its logits."""
        step.fill_in_pending()
        batch = step.batch
        slots, contexts = batch.slot_mapping, batch.context_lens
        tables = (batch.cu_blocks, batch.block_tables)
        arrays = map(array, (step.input_ids, step.positions, slots, contexts, *tables))
        self._call(Inputs(*arrays))
        step.logits = self.logits[:size]
        return self.last[:size], step

    def _call(self, inputs: Inputs) -> None:
        work = self.model.gate_up.codes.size * len(inputs.ids)
        num_threads = torch.get_num_threads() if work >= SMALL else 1
        clocks = np.zeros(num_threads, np.int64)
        call = partial(self.step, inputs, self.model, self.memory, clocks)
        others = []
        try:
            for thread in range(1, num_threads):
                others.append(self._threads().submit(call, thread))
            call(0)
        finally:  # an interrupt may come before the call: then the others must not wait for it
            clocks[0] = NEVER
            for other in others:
                other.result()

    def _threads(self) -> ThreadPoolExecutor:
        """Of this engine, so that all threads of a step run. A forked process has none of them."""
        if self.process != os.getpid():
            self.process = os.getpid()
            self.pool = ThreadPoolExecutor(torch.get_num_threads(), "step")
        assert self.pool is not None
        return self.pool


# --- what it is bound to ---


def bind(model: Any, kv_cache: KVCache) -> NumbaStep | None:
    """A NumbaStep; None if there is none for this model, or if it would copy too much."""
    if type(model) is not DenseModel or numba.config.DISABLE_JIT:
        return None
    head = form_of(model.lm_head)
    found = {(*map(form_of, linears_of(layer)), head) for layer in model.model.layers}
    forms = Forms(*found.pop())
    if found or None in forms or forms.qkv != forms.gate_up:
        return None
    num_bytes = sum(map(row_bytes, linears_of(model.model if has_tied_head(model) else model)))
    copied = f"a second form of the weights takes {num_bytes / 2**20:,.0f} MiB"
    if num_bytes > MOST_COPIED:
        most = f"more than {MOST_COPIED / 2**20:,.0f}"
        logger.info("decodes run layer by layer: %s, %s", copied, most)
        return None
    logger.info("a decode of 1 to %d sequences is one call: %s", FEW, copied)
    return NumbaStep(model, kv_cache, forms)


def linears_of(module: nn.Module) -> list[Linear]:
    """In the order of Forms."""
    return [one for one in module.modules() if isinstance(one, Linear)]


def form_of(linear: Linear) -> Form | None:
    """How the layer's weight is kept; None if there is no kernel for it."""
    if not linear.weight.is_meta:
        return PLAIN
    from nanovllm.topics.quantization import numba_product  # chapter 21

    return numba_product.form_of(linear)


def has_tied_head(model: DenseModel) -> bool:
    """Whether the head's rows are those of the embedding."""
    return model.is_tied and form_of(model.lm_head) is PLAIN


def row_bytes(linear: Linear) -> int:
    """What the weight takes as rows. One in 4 bits counts as if it had 8."""
    return linear.weight.numel() * (1 if linear.weight.is_meta else linear.weight.itemsize)


def weights_of(layers: Sequence[nn.Module], name: str, plain: Tensor | None = None) -> Weights:
    """A product's weights in all layers, or the plain weight that the only layer has."""
    linears = [*map(attrgetter(name), layers)]
    rows = [rows_of(linear) if plain is None else (plain, *NOTHING) for linear in linears]
    none = torch.zeros(0, dtype=linears[0].weight.dtype)
    biases = [none if linear.bias is None else linear.bias for linear in linears]
    return Weights(*map(stacked, [*zip(*rows), biases]))


def rows_of(linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a weight."""
    if linear.weight.is_meta:
        from nanovllm.topics.quantization.layers import groups_in  # chapter 21

        codes, scales, zeros = groups_in(linear)
        return codes, scales, NOTHING[1] if zeros is None else zeros
    return (linear.weight.to_dense() if linear.weight.is_mkldnn else linear.weight), *NOTHING


def norms_of(layers: Sequence[nn.Module], name: str) -> np.ndarray:
    """The weights of a norm in all layers [layers, size], or [layers, 0]."""
    norms = map(attrgetter(name), layers)
    return stacked([torch.zeros(0) if norm is None else norm.weight for norm in norms])


def stacked(tensors: Sequence[Tensor]) -> np.ndarray:
    """[layers, ...]. A single one is not copied."""
    return array(torch.stack([*tensors]) if len(tensors) > 1 else tensors[0].unsqueeze(0))


def new_rows(x: Tensor, form: Form) -> Rows:
    """Memory for the input of a product. Its numbers x [T, in] may be somebody else's, too."""
    group = form.group or x.shape[1]
    grouped = x.view(len(x), -1, group)
    num_groups = grouped.shape[1]
    integers = torch.zeros(len(x), num_groups + num_groups % 2, group, dtype=torch.int16)
    scales = torch.empty(len(x), num_groups)
    return Rows(*map(array, (x, grouped, integers, scales, scales.int())))
