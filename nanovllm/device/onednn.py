"""oneDNN: linear layers on a CPU, with weights in a layout of its own. The operators are PyTorch's
private ones."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.device.heap import trim
from nanovllm.layers.linear import Groups, Linear


def convert(
    linear: Linear,
    stored: Groups | None,
    is_head: bool = False,
    quantize: Callable[..., bool] | None = None,
    product: Callable = F.linear,
) -> None:
    """Gives a layer its form once its weight is loaded: few bits (chapter 21), or as it is for the
    `product` of the backend, or oneDNN's layout. `stored` are the groups of a quantized
    checkpoint."""
    if quantize is not None and quantize(linear, stored, is_head):
        trim()
    elif linear.num_experts is None:  # experts.py multiplies matrices one by one
        linear.product = product
        if product is F.linear:
            use_onednn(linear)


def use_onednn(linear: Linear) -> None:
    """Lets oneDNN compute the layer where it is faster. Call it once the weight is loaded.

    The dtype and the instruction set decide, not a measurement: the same model must always round in
    the same way. The weight goes into oneDNN's layout, and a head that is tied to the embedding
    becomes a second tensor. With a plain weight, oneDNN sums up a single row in another order than
    several, and is up to 4 times as slow in bfloat16. In float32 with AVX-512, it does so with any
    weight whose rows have more than 1,024 numbers: there, a row alone may round differently.
    """
    plain = linear.weight
    if plain.device.type != "cpu" or not onednn_is_faster(plain.dtype):
        return
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(plain)
        # no activation after the product
        product = partial(torch.ops.mkldnn._linear_pointwise, attr="none", scalars=[], algorithm="")
        product(plain[:1], weight, None)
    except (AttributeError, RuntimeError):
        return  # not in this PyTorch, or not on this CPU
    linear.product = product
    linear.weight = nn.Parameter(weight, requires_grad=False)
    trim()


def onednn_is_faster(dtype: torch.dtype) -> bool:
    """Whether oneDNN is faster: in float32 without AVX2 it takes three times as long as PyTorch."""
    has_avx2 = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return dtype == torch.bfloat16 or (dtype == torch.float32 and has_avx2)
