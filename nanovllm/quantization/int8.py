"""Weights in 8 bits on a CPU: oneDNN's product of integers. It reads a quarter of the bytes of
float32, and multiplies several integers at a time. Its operators are PyTorch's private ones."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from nanovllm.quantization.groups import LARGEST, Groups, quantize


def new_product(weight: Groups) -> Callable[[Tensor], Tensor]:
    """The product with a weight in 8 bits whose groups are rows, in oneDNN's own layout."""
    codes = weight.codes.flatten(1)
    zeros = torch.zeros(len(codes), dtype=torch.int32)
    # the layout is chosen for about this many rows of activations
    packed = torch.ops.onednn.qlinear_prepack(codes, [64, codes.shape[1]])
    return partial(onednn_product, packed=packed, scales=weight.scales.squeeze(1), zeros=zeros)


def onednn_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """x [T, in] times the weight: fp32 [T, out]. Activations must be uint8: oneDNN computes signed
    ones with plain loops."""
    largest = largest_activation()
    rows, scale = quantize(x, largest)
    zero = largest + 1
    rows += zero
    return multiplied(rows.to(torch.uint8), zero, packed, scales, zeros).mul_(scale)


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
