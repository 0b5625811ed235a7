"""Weights in 8 bits, times activations in 8 bits.

A row of the weight has one scale: its largest number becomes 127. So does a row of activations, in
each product. Sums of integers are exact in any order, so a row of the result does not depend on its
batch, to the last bit. On a CPU, oneDNN computes the product (its operators are PyTorch's private
ones): it reads a quarter of the bytes of float32, and multiplies several integers at a time.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import Linear

LARGEST = 127
SMALLEST_SCALE = 1e-30  # of a row of zeros
ROWS = 4096  # that are quantized at a time: a head has many


def quantize(numbers: Tensor, largest: int = LARGEST) -> tuple[Tensor, Tensor]:
    """Numbers [n, k] as integers from -largest to largest, in fp32, and a scale [n, 1] for each
    row."""
    numbers = numbers.float()
    scales = (numbers.abs().amax(-1, True) / largest).clamp_(min=SMALLEST_SCALE)
    return (numbers / scales).round_(), scales


def plain_product(x: Tensor, codes: Tensor, bias: Tensor | None, scales: Tensor) -> Tensor:
    """x [T, in] times codes [out, in] int8 with scales [out] fp32, in PyTorch, on any device."""
    rows, scale = quantize(x)
    product = F.linear(rows, codes.float()) * scale * scales
    return with_bias(product, bias, x.dtype)


def onednn_product(
    x: Tensor, packed: Tensor, bias: Tensor | None, scales: Tensor, zeros: Tensor
) -> Tensor:
    """The same in oneDNN. Activations must be uint8: it computes signed ones with plain loops."""
    largest = largest_activation()
    rows, scale = quantize(x, largest)
    zero = largest + 1
    rows += zero
    product = multiplied(rows.to(torch.uint8), zero, packed, scales, zeros)
    return with_bias(product.mul_(scale), bias, x.dtype)


def multiplied(rows: Tensor, zero: int, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(rows - zero) times the packed weight and its scales, in fp32. uint8 rows [T, in]."""
    return torch.ops.onednn.qlinear_pointwise(
        rows,
        1.0,
        zero,
        packed,
        scales,
        zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )  # no bias; a result in fp32, and nothing behind it


def with_bias(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        product += bias
    return product.to(dtype)


@cache
def largest_activation() -> int:
    """127, or 63 where the CPU adds pairs of products in 16 bits (AVX2 without VNNI): sums beyond
    32,767 would be cut off there. 0 if oneDNN cannot compute such products here."""
    size = 64
    codes = torch.full((size, size), LARGEST, dtype=torch.int8)
    rows = torch.full((2, size), 255, dtype=torch.uint8)
    ones, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int32)
    try:
        packed = torch.ops.onednn.qlinear_prepack(codes, [2, size])
        product = multiplied(rows, 0, packed, ones, zeros)
    except (AttributeError, RuntimeError):
        return 0  # not in this PyTorch, or not on this CPU
    return LARGEST if (product == 255 * LARGEST * size).all() else LARGEST // 2


def use_int8(linear: Linear) -> None:
    """Quantizes a layer whose weight is loaded."""
    pieces = []
    for piece in linear.weight.data.split(ROWS):
        numbers, scale = quantize(piece)
        pieces.append((numbers.to(torch.int8), scale))
    codes = torch.cat([numbers for numbers, _ in pieces])
    scales = torch.cat([scale.squeeze(1) for _, scale in pieces])
    linear.product = partial(plain_product, scales=scales)
    if codes.device.type == "cpu" and largest_activation():
        zeros = torch.zeros(len(codes), dtype=torch.int32)
        # the layout is chosen for about this many rows of activations
        codes = torch.ops.onednn.qlinear_prepack(codes, [64, codes.shape[1]])
        linear.product = partial(onednn_product, scales=scales, zeros=zeros)
    linear.weight = nn.Parameter(codes, requires_grad=False)
