"""Linear layers change their form while a model loads: one by one, so only one has both forms."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from nanovllm.config import Config
from nanovllm.layers.experts import Pairs
from nanovllm.layers.linear import Groups, Linear, Quantized
from nanovllm.layers.ops import Ops
from nanovllm.models.dense import head_dim_of
from nanovllm.models.experts import Router
from nanovllm.topics.quantization import int8
from nanovllm.topics.quantization.groups import (
    LARGEST,
    SIZES,
    in_4_bits,
    in_8_bits,
)
from nanovllm.topics.quantization.methods import method_of

ROWS = 4096  # of a weight, that are quantized at a time: a head has many


def quantizer(config: Config, hf_config, ops: Ops) -> Callable[..., bool]:
    """Returns the function that gives a linear layer its form, once its weight is loaded: see
    `in_few_bits`. Raises ValueError if a row of a weight cannot be divided into groups, or if the
    checkpoint has codes of its own."""
    num_ranks = config.tensor_parallel_size
    method = method_of(hf_config)
    if method is not None and method.has_codes:
        own = f"None: the checkpoint has codes of its own, by {method.name}"
        config.require("quantization", config.quantization is None, own)
        check_widths(hf_config, num_ranks, method.group, f"group_size={method.group}")
    if config.quantization == "int4":
        check_widths(hf_config, num_ranks, SIZES[-1], "quantization='int4'")
    return partial(in_few_bits, quantization=config.quantization, ops=ops)


def check_widths(hf_config, num_ranks: int, group: int, setting: str) -> None:
    """Raises ValueError, with the name of the setting, if groups of this size do not divide the
    rows that a rank has."""
    heads = hf_config.num_attention_heads * head_dim_of(hf_config) // num_ranks
    widths = [hf_config.hidden_size, heads]
    for name in ("intermediate_size", "moe_intermediate_size"):
        if hasattr(hf_config, name):
            widths.append(-(-getattr(hf_config, name) // num_ranks))
    if hasattr(hf_config, "linear_num_value_heads"):  # layers with states
        values = hf_config.linear_num_value_heads * hf_config.linear_value_head_dim
        widths.append(values // num_ranks)
    for width in widths:
        if width % group:
            where = f"tensor_parallel_size={num_ranks}" if num_ranks > 1 else "this model"
            why = f"groups of {group} numbers do not divide rows of {width}"
            raise ValueError(f"{setting} is not possible with {where}: {why}")


def in_few_bits(
    linear: Linear, stored: Groups | None, is_head: bool, quantization: str | None, ops: Ops
) -> bool:
    """Gives the layer its form: the groups that the checkpoint has stored, or those of the option.
    False if its weight stays as it is."""
    weight = stored
    # a router's code that is off by one would choose another expert
    if weight is None and quantization is not None and not isinstance(linear, Router):
        # a head in 4 bits would cost half as much quality as all layers do (chapter 21)
        has_4_bits = quantization == "int4" and not is_head
        largest = int8.largest_code() if linear.weight.device.type == "cpu" else 0
        in_8_or_7_bits = partial(in_8_bits, largest=largest or LARGEST)
        to_groups = in_4_bits if has_4_bits else in_8_or_7_bits
        weight = joined([to_groups(rows) for rows in linear.weight.data.split(ROWS)])
    if weight is None:
        return False
    linear.quantized = ops.quantized_product(weight, linear.num_experts)
    product = multiply if linear.num_experts is None else multiply_pairs
    linear.product = partial(product, product=linear.quantized)
    # the product holds it; of the parameter, the shape is left
    linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    return True


def joined(parts: list[Groups]) -> Groups:
    """The rows of all parts."""
    codes, scales, zeros = zip(*parts)
    return Groups(torch.cat(codes), torch.cat(scales), None if None in zeros else torch.cat(zeros))


def multiply(x: Tensor, _: Tensor, bias: Tensor | None, product: Quantized) -> Tensor:
    """Takes the place of F.linear. The weight is in `product`."""
    result = product(x)
    if bias is not None:
        result += bias
    return result.to(x.dtype)


def multiply_pairs(x: Tensor, _: Tensor, pairs: Pairs, product: Quantized) -> Tensor:
    """Takes the place of a grouped product."""
    return product(x, pairs).to(x.dtype)
