"""Groups: weights as small integers, with a scale for each group of numbers in a row.

A weight is (code - zero) * scale. With 8 bits, a code is the int8 code - zero itself, and a group
may be a whole row. With 4 bits, a code is 0 to 15, a group has its own zero, and a byte holds two
codes: those at the same place of two neighboring groups, so that a loop reads both groups at once.
Activations are rounded to integers, too, with a scale for each group of a row: sums of integers are
exact in any order, so a row of the result does not depend on its batch, to the last bit.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.linear import Groups as Groups

SIZES = (128, 64, 32)  # of a group of 4-bit codes: the first that divides a row
LARGEST = 127
LARGEST_CODE = 15  # of 4 bits
SMALLEST_SCALE = 1e-30  # of a group of zeros
ROWS = 1024  # of the weight, which are unpacked at a time


class Product:
    """A product that holds the weight as groups. It is a `Quantized`, see layers/linear.py."""

    def __init__(
        self,
        weight: Groups,
        multiply: Callable[..., Tensor],
    ):
        self.held = weight
        self.multiply = multiply
        self.group = weight.codes.shape[2]

    def __call__(self, x: Tensor, *pairs: Any) -> Tensor:
        return self.multiply(x, self.held, *pairs)

    def weight(self) -> Groups:
        return self.held


def quantize(numbers: Tensor, largest: int = LARGEST) -> tuple[Tensor, Tensor]:
    """Numbers [..., n] as integers from -largest to largest, in fp32, and a scale [..., 1]. A row
    with a NaN or an infinity gets a scale that is not finite. Kernels do the same: they divide once
    per row, and round ties to even."""
    numbers = numbers.float()
    scales = numbers.abs().amax(-1, True) * (1 / largest)
    scales.clamp_(min=SMALLEST_SCALE)
    codes = (numbers * (1 / scales)).round_()
    return codes, scales


def in_8_bits(weight: Tensor, largest: int = LARGEST) -> Groups:
    """Quantizes a weight [out, in], of which a row is a group: its largest number becomes `largest`
    or -largest."""
    numbers, scales = quantize(weight, largest)
    codes = numbers.to(torch.int8)
    groups = codes.unsqueeze(1)
    return Groups(groups, scales, None)


def in_4_bits(weight: Tensor, group: int | None = None) -> Groups:
    """Quantizes a weight [out, in]: the numbers of a group, from the smallest to the largest,
    become 0 to 15. One of them stands for 0. `group` must divide a row; by default, it is the
    first of SIZES that does."""
    group = group or next(size for size in SIZES if weight.shape[1] % size == 0)
    numbers = weight.unflatten(1, (-1, group)).float()
    smallest = numbers.amin(-1, True).clamp_(max=0)
    largest = numbers.amax(-1, True).clamp_(min=0)
    scales = (largest - smallest) / LARGEST_CODE
    scales.clamp_(min=SMALLEST_SCALE)
    zeros = (-smallest / scales).round_()
    codes = (numbers / scales).round_() + zeros
    codes.clamp_(0, LARGEST_CODE)
    return Groups(
        packed(codes),
        scales.squeeze(-1),
        zeros.squeeze(-1).to(torch.uint8),
    )


def packed(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [out, groups, group] as uint8 [out, pairs, group]: the first group of a pair is
    in the low bits. If the number of groups is odd, the last group has zeros beside it."""
    codes = codes.to(torch.uint8)
    codes = F.pad(codes, (0, 0, 0, codes.shape[1] % 2))
    pairs = codes.unflatten(1, (-1, 2))
    low, high = pairs.unbind(2)
    return low | high << 4


def integers_of(weight: Groups, rows: slice) -> Tensor:
    """code - zero of some rows: int8 [rows, groups, group]."""
    codes = weight.codes[rows]
    if weight.zeros is None:
        return codes
    zeros = weight.zeros[rows].view(torch.int8)
    low = codes & LARGEST_CODE
    high = codes >> 4
    both = torch.stack([low, high], 2)
    numbers = both.flatten(1, 2).view(torch.int8)
    return numbers[:, : zeros.shape[1]] - zeros.unsqueeze(-1)


def dequantized(weight: Groups) -> Tensor:
    """The weight [out, in] in fp32."""
    numbers = integers_of(weight, slice(None))
    scales = weight.scales.unsqueeze(-1)
    return (numbers * scales).flatten(1)


def plain_product(x: Tensor, weight: Groups) -> Tensor:
    """x [T, in] times the weight: fp32 [T, out], in PyTorch, on any device."""
    num_out, num_groups = weight.scales.shape
    grouped = x.unflatten(1, (num_groups, -1))
    rows, row_scales = quantize(grouped)
    largest = LARGEST if weight.zeros is None else LARGEST_CODE
    # in which all sums of integers are exact
    largest_sum = grouped.shape[2] * LARGEST * largest
    dtype = torch.float32
    if largest_sum >= 2**24:
        dtype = torch.float64
    rows = rows.to(dtype)
    result = row_scales.new_zeros(len(x), num_out)
    for first in range(0, num_out, ROWS):
        some = slice(first, first + ROWS)
        numbers = integers_of(weight, some).to(dtype)
        for g in range(num_groups):
            sums = F.linear(rows[:, g], numbers[:, g])
            sums = sums.float()
            scales = row_scales[:, g] * weight.scales[some, g]
            result[:, some] += sums * scales
    return result
