"""Weights in 8 bits on a CPU: oneDNN's product of integers. It reads a quarter of the bytes of
float32, and multiplies several integers at a time. Its operators are PyTorch's private ones."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.linear import Groups, Quantized
from nanovllm.topics.quantization.groups import LARGEST, Product, plain_product, quantize

ZERO = LARGEST + 1  # what stands for 0 in activations
AFTER: tuple = (  # arguments that say what follows a product
    None,  # no bias
    1.0,  # the scale of the result ...
    0,  # ... and its zero
    torch.float32,
    "none",  # no operation
    [],
    "",
)


def in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [T, in] as uint8, with ZERO for 0, and their scales [T, 1]."""
    rows, scales = quantize(x)
    rows += ZERO
    return rows.to(torch.uint8), scales


class Int8Product:
    """The product with a weight in 8 bits whose groups are rows, in oneDNN's own layout."""

    def __init__(self, weight: Groups, in_bytes: Callable = in_bytes):
        codes = weight.codes.flatten(1)
        self.in_bytes = in_bytes
        self.group = codes.shape[1]
        # the layout is chosen for about this many rows of activations
        packed = torch.ops.onednn.qlinear_prepack(codes, [64, self.group])
        self.held = Groups(packed, weight.scales, None)
        self.no_zeros = torch.zeros(len(codes), dtype=torch.int32)

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        """x [T, in] times the weight: fp32 [T, out]. Activations must be uint8: oneDNN computes
        signed ones with plain loops."""
        rows, row_scales = self.in_bytes(x)
        scales = self.held.scales.squeeze(1)
        return multiplied(rows, ZERO, self.held.codes, scales, self.no_zeros).mul_(row_scales)

    def weight(self) -> Groups:
        codes = self.held.codes.to_dense().T.contiguous()
        return Groups(codes.unsqueeze(1), self.held.scales, None)


def product_of(weight: Groups, in_bytes: Callable = in_bytes) -> Quantized:
    """The product in PyTorch: that of oneDNN, if it has one."""
    if can_multiply(weight):
        return Int8Product(weight, in_bytes)
    return Product(weight, plain_product)


def multiplied(rows: Tensor, zero: int, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(rows - zero) times the packed weight and its scales, in fp32. uint8 rows [T, in]."""
    return torch.ops.onednn.qlinear_pointwise(rows, 1.0, zero, packed, scales, zeros, *AFTER)


def can_multiply(weight: Groups) -> bool:
    """Whether oneDNN has a product for this weight: on a CPU, in 8 bits, with rows as groups, and
    with codes whose sums are not cut off there."""
    is_on_cpu = weight.codes.device.type == "cpu"
    if not is_on_cpu or weight.zeros is not None or weight.scales.shape[1] > 1:
        return False
    largest = largest_code()
    if not largest:
        return False
    return bool(-largest - 1 <= weight.codes.min() and weight.codes.max() <= largest)


@cache
def largest_code() -> int:
    """127, or 63 where the CPU adds pairs of products in 16 bits (AVX2 without VNNI): sums beyond
    32,767 would be cut off there. So a weight has 7 bits, which costs less quality than activations
    in 7 bits would. 0 if oneDNN cannot compute such products here."""
    size = 64
    rows = torch.full((2, size), 255, dtype=torch.uint8)
    ones, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int32)
    for largest in (LARGEST, LARGEST // 2):
        codes = torch.full((size, size), largest, dtype=torch.int8)
        try:
            packed = torch.ops.onednn.qlinear_prepack(codes, [2, size])
            product = multiplied(rows, 0, packed, ones, zeros)
        except (AttributeError, RuntimeError):
            return 0  # not in this PyTorch, or not on this CPU
        if (product == 255 * largest * size).all():
            return largest
    return 0
