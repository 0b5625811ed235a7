"""Linear layers change their form while a model loads: one by one, so only one has both forms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.device.heap import trim
from nanovllm.device.onednn import use_onednn
from nanovllm.layers.linear import Linear
from nanovllm.models.dense import has_states, head_dim_of
from nanovllm.topics.quantization import int8
from nanovllm.topics.quantization.checkpoints import groups_of
from nanovllm.topics.quantization.groups import (
    LARGEST,
    SIZES,
    Groups,
    in_4_bits,
    in_8_bits,
    plain_product,
)
from nanovllm.topics.quantization.methods import method_of

ROWS = 4096  # of a weight, that are quantized at a time: a head has many

Product = Callable[[Tensor], Tensor]


def choose_product(config: Config, hf_config, ops: Any) -> Callable[[Linear], None]:
    """Returns the function that gives a linear layer its form, once its weight is loaded. Raises
    ValueError if a row of a weight cannot be divided into groups, or if the checkpoint has codes
    of its own."""
    num_ranks = config.tensor_parallel_size
    method = method_of(hf_config)
    if method is not None and method.has_codes:
        own = f"None: the checkpoint has codes of its own, by {method.name}"
        config.require("quantization", config.quantization is None, own)
        check_widths(hf_config, num_ranks, method.group, f"group_size={method.group}")
    if config.quantization == "int4":
        check_widths(hf_config, num_ranks, SIZES[-1], "quantization='int4'")
    return partial(prepare_linear, quantization=config.quantization, backend=ops.NAME)


def check_widths(hf_config, num_ranks: int, group: int, setting: str) -> None:
    """Raises ValueError, with the name of the setting, if groups of this size do not divide the
    rows that a rank has."""
    heads = hf_config.num_attention_heads * head_dim_of(hf_config) // num_ranks
    widths = [hf_config.hidden_size, heads]
    for name in ("intermediate_size", "moe_intermediate_size"):
        if hasattr(hf_config, name):
            widths.append(-(-getattr(hf_config, name) // num_ranks))
    if has_states(hf_config):
        values = hf_config.linear_num_value_heads * hf_config.linear_value_head_dim
        widths.append(values // num_ranks)
    for width in widths:
        if width % group:
            why = f"groups of {group} numbers do not divide rows of {width}"
            raise ValueError(
                f"{setting} is not possible with tensor_parallel_size={num_ranks}: {why}"
            )


def prepare_linear(linear: Linear, quantization: str | None, backend: str) -> None:
    """Gives the layer its form: the weight's groups, if the checkpoint or the option has them."""
    weight = groups_of(linear)
    if weight is None and quantization is not None and not hasattr(linear, "is_router"):
        # a head in 4 bits would cost half as much quality as all layers do (chapter 21)
        has_4_bits = quantization == "int4" and not hasattr(linear, "is_head")
        largest = int8.largest_code() if linear.weight.device.type == "cpu" else 0
        in_8_or_7_bits = partial(in_8_bits, largest=largest or LARGEST)
        to_groups = in_4_bits if has_4_bits else in_8_or_7_bits
        weight = joined([to_groups(rows) for rows in linear.weight.data.split(ROWS)])
    if weight is None:
        use_onednn(linear)
    else:
        num_experts = getattr(linear, "num_experts", None)
        if num_experts is None:
            use_groups(linear, weight, backend)
        else:
            from nanovllm.topics.quantization import experts

            linear.product = experts.product_for(weight, num_experts, backend, product_for)
            size = len(weight.scales) // num_experts
            # for topics/checks/kernels.py
            plain = partial(experts.plain, weight=weight, size=size)
            linear.plain_product = plain  # type: ignore[assignment]
        # the product holds it; of the parameter, the shape is left
        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
        trim()


def use_groups(linear: Linear, weight: Groups, backend: str) -> None:
    """Lets the layer multiply with the groups."""
    linear.product = partial(multiply, product=product_for(weight, backend))
    if backend == "numba":
        from nanovllm.topics.quantization import numba_product

        held = linear.product.keywords["product"].keywords
        # for device/numba_graphs.py
        linear.form = numba_product.form_of(weight)  # type: ignore[assignment]
        linear.groups = partial(groups_in, **held)  # type: ignore[assignment]


def joined(parts: list[Groups]) -> Groups:
    """The rows of all parts."""
    codes, scales, zeros = zip(*parts)
    return Groups(torch.cat(codes), torch.cat(scales), None if None in zeros else torch.cat(zeros))


def product_for(weight: Groups, backend: str) -> Product:
    """Returns the function that multiplies activations [T, in] with this weight."""
    is_cpu = weight.codes.device.type == "cpu"
    if is_cpu and backend == "numba":
        from nanovllm.topics.quantization import numba_product

        if weight.zeros is not None:
            return partial(numba_product.product, weight=weight)
        if int8.can_multiply(weight):
            return int8.new_product(weight, numba_product.in_bytes)
    if is_cpu and int8.can_multiply(weight):
        return int8.new_product(weight)
    if backend == "triton":
        from nanovllm.topics.quantization import triton_product

        return partial(triton_product.product, weight=weight)
    return partial(plain_product, weight=weight)


def multiply(x: Tensor, _: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Takes the place of F.linear. The weight is in `product`."""
    result = product(x)
    if bias is not None:
        result += bias
    return result.to(x.dtype)


def groups_in(weight: Groups | None = None, **parts: Tensor) -> Groups:
    """The weight that a product holds: a copy, if oneDNN has it in a layout of its own."""
    if weight is not None:
        return weight
    codes = parts["packed"].to_dense().T.contiguous()
    return Groups(codes.unsqueeze(1), parts["scales"].unsqueeze(1), None)
