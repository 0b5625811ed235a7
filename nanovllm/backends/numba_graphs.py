"""A decode bound to a model: on a CPU, what cuda_graphs.py is on a GPU. The step itself is in
layers/numba_step.py."""

import logging
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numba.core import config
from torch import Tensor, nn

from nanovllm.backends.numba_changes import Changes
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.linear import Linear
from nanovllm.layers.numba_int8 import store_int8_kernel
from nanovllm.layers.numba_kernels import store_kv_kernel
from nanovllm.layers.numba_products import IN_4_BITS, IN_8_BITS
from nanovllm.layers.numba_run import SMALL, array, run_on
from nanovllm.layers.numba_step import (
    PLAIN,
    Activations,
    Form,
    Forms,
    Inputs,
    Memory,
    Model,
    Weights,
    new_rows,
    step_kernel,
)
from nanovllm.layers.numba_tiles import FEW, are_fastest
from nanovllm.models.dense import DenseModel
from nanovllm.step import StepInputs

logger = logging.getLogger(__name__)

# sequences. With more of them, faster products are worth the calls between them
MANY = 128
MANY_IN_FEW_BITS = 16
MOST_COPIED = 2**30  # bytes of weights that are kept in two forms
NOTHING = (torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.uint8))  # scales and zeros


class NumbaStep:
    """A model, bound to its weights and its cache. Its methods are those of StepGraphs."""

    def __init__(self, model: DenseModel, kv_cache: KVCache, forms: Forms, largest: int):
        self.sizes = [largest]  # one function serves all numbers of sequences up to this one
        decoder = model.model
        layers: Any = decoder.layers
        attention = layers[0].self_attn
        embedding = decoder.embed_tokens.weight
        weights = partial(weights_of, layers)
        norms = partial(norms_of, layers)
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
        new = partial(decoder.norm.weight.new_zeros, largest)
        size = len(decoder.norm.weight)
        middle = layers[0].mlp.gate_up_proj.weight.shape[0] // 2
        heads = new(num_heads + 2 * kv_heads, head_dim)
        attended = new(num_heads, head_dim)
        self.last = new(size)
        self.logits = new(model.lm_head.weight.shape[0])
        self.memory = Memory(
            residual=array(new(size)),
            added=array(new(size)),
            cos_sin=array(new(head_dim).float()),
            hidden=rows_for(new(size), attention.qkv_proj, forms.qkv),
            qkv=array(heads.flatten(1)),
            heads=array(heads),
            q=array(new(num_heads, head_dim)),
            k=array(new(kv_heads, head_dim)),
            v=array(new(kv_heads, head_dim)),
            attended=array(attended),
            flat=rows_for(attended.flatten(1), attention.o_proj, forms.out),
            gate_up=array(new(2 * middle)),
            middle=rows_for(new(middle), layers[0].mlp.down_proj, forms.down),
            last=rows_for(self.last, model.lm_head, forms.head),
            logits=array(self.logits),
        )
        self.changes = Changes(model)

    def record(self, size: int) -> None:
        """Compiles the function: runs it for one sequence, in the first block."""
        zero = np.zeros(1, np.int32)
        number = np.zeros(1, np.int64)
        self._call(Inputs(number, number, number, zero + 1, np.zeros(2, np.int32), zero))

    def size_for(self, step: StepInputs) -> int | None:
        """The number of sequences; None if another way must compute the step: it has chunks, or
        the user has changed the model."""
        num_seqs = len(step.batch.context_lens)
        has_chunks = step.batch.num_decodes < num_seqs
        is_other = has_chunks or num_seqs > self.sizes[-1] or self.changes.found()
        return None if is_other else num_seqs

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step with its logits."""
        step.fill_in_pending()
        batch = step.batch
        slots, contexts = batch.slot_mapping, batch.context_lens
        tables = (batch.cu_blocks, batch.block_tables)
        arrays = map(array, (step.input_ids, step.positions, slots, contexts, *tables))
        self._call(Inputs(*arrays))
        step.logits = self.logits[step.sampled_rows]
        return self.last[:size], step

    def _call(self, inputs: Inputs) -> None:
        work = self.model.gate_up.codes.size * len(inputs.ids)
        num_threads = torch.get_num_threads() if work >= SMALL else 1
        clocks = np.zeros(num_threads, np.int64)
        run_on(num_threads, self.step, (inputs, self.model, self.memory, clocks))


def bind(model: Any, kv_cache: KVCache, max_num_seqs: int) -> NumbaStep | None:
    """A NumbaStep; None if there is none for this model, or if it would copy too much."""
    is_compiled = not config.DISABLE_JIT  # type: ignore[attr-defined]
    if type(model) is not DenseModel or not is_compiled:
        return None
    head = form_of(model.lm_head)
    found = {(*map(form_of, linears_of(layer)), head) for layer in model.model.layers}
    forms = Forms(*found.pop())  # type: ignore[arg-type]
    if found or None in forms or forms.qkv != forms.gate_up:
        return None
    linears = linears_of(model.model if has_tied_head(model) else model)
    num_bytes = sum(map(copied_bytes, linears))
    copied = f"a second form of the weights takes {num_bytes / 2**20:,.0f} MiB"
    if num_bytes > MOST_COPIED:
        logger.info("decodes run layer by layer: %s, more than %d", copied, MOST_COPIED >> 20)
        return None
    largest = min(largest_of(forms, model.lm_head.weight.dtype), max_num_seqs)
    logger.info("a decode of 1 to %d sequences is one call: %s", largest, copied)
    return NumbaStep(model, kv_cache, forms, largest)


def largest_of(forms: Forms, dtype: torch.dtype) -> int:
    """The number of sequences up to which one call is faster than the layers."""
    if forms.qkv is not PLAIN:
        return MANY_IN_FEW_BITS
    return MANY if are_fastest(dtype) else FEW


def linears_of(module: nn.Module) -> list[Linear]:
    """The linear layers, in the order of Forms."""
    return [one for one in module.modules() if isinstance(one, Linear)]


def form_of(linear: Linear) -> Form | None:
    """How the layer's weight is kept; None if there is no kernel for it."""
    quantized = linear.quantized
    if quantized is None:
        return PLAIN
    if quantized.held.zeros is not None:
        return IN_4_BITS
    return IN_8_BITS if quantized.held.scales.shape[1] == 1 else None


def has_tied_head(model: DenseModel) -> bool:
    """Whether the head's rows are those of the embedding."""
    return model.is_tied and form_of(model.lm_head) is PLAIN


def copied_bytes(linear: Linear) -> int:
    """What a second form of the weight takes: of oneDNN's, and of codes in 8 bits."""
    weight = linear.weight
    if linear.quantized is None:
        return weight.nbytes if weight.is_mkldnn else 0
    return weight.numel() if linear.quantized.held.zeros is None else 0


def rows_for(x: Tensor, linear: Linear, form: Form) -> Activations:
    """Memory for the input of the layer's product, whose numbers are in x."""
    group = x.shape[1] if linear.quantized is None else linear.quantized.group
    return new_rows(x, form, group)


def weights_of(layers: Sequence[nn.Module], name: str, plain: Tensor | None = None) -> Weights:
    """A product's weights in all layers, or the plain weight that the only layer has."""
    linears = [*map(attrgetter(name), layers)]
    rows = [rows_of(linear) if plain is None else (plain, *NOTHING) for linear in linears]
    none = torch.zeros(len(linears[0].weight))
    biases = [none if linear.bias is None else linear.bias for linear in linears]
    return Weights(*map(stacked, [*zip(*rows), biases]))


def rows_of(linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a weight."""
    weight = linear.weight
    quantized = linear.quantized
    if quantized is None:
        return (weight.to_dense() if weight.is_mkldnn else weight), *NOTHING
    codes, scales, zeros = quantized.held
    if zeros is None:
        return quantized.weight().codes, scales, NOTHING[1]
    return codes, scales, zeros


def norms_of(layers: Sequence[nn.Module], name: str) -> np.ndarray:
    """The weights of a norm in all layers [layers, size], or [layers, 0]."""
    norms = map(attrgetter(name), layers)
    return stacked([torch.zeros(0) if norm is None else norm.weight for norm in norms])


def stacked(tensors: Sequence[Tensor]) -> np.ndarray:
    """[layers, ...]. The tensors become parts of it: each is in memory once, and a change of its
    numbers counts."""
    if len(tensors) == 1:
        return array(tensors[0])[None]
    whole = torch.stack([*tensors])
    for tensor, part in zip(tensors, whole):
        tensor.data = part
    return array(whole)
