"""The product with weights in 8 or 4 bits in Triton: codes become numbers of the activations' dtype
in registers, so only codes and scales are read from memory. Sums are in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.topics.quantization.groups import Groups

ROWS = 16  # of activations, per program: tl.dot takes no fewer
OUT = 64  # rows of the weight, per program
NUMBERS = 128  # of a row at a time
FEW_NUMBERS = 32  # where more would take too many registers


@triton.jit
def tile_product(
    x_rows,  # addresses of rows of x, [ROWS, 1]
    is_row,
    codes,
    scales,
    zeros,
    output,  # rows of the weight, int64 [OUT]
    is_output,
    num_in,
    num_groups,
    group_size,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Rows of x times rows of the weight, in fp32 [ROWS, OUT]. NUMBERS of a row are read at a time:
    a group of `group_size` numbers, or a part."""
    number = tl.arange(0, NUMBERS)
    result = tl.zeros([ROWS, OUT], tl.float32)
    for tile in range(tl.cdiv(num_in, NUMBERS)):
        at = tile * NUMBERS + number
        is_in = at < num_in
        numbers = tl.load(x_rows + at, mask=is_row[:, None] & is_in, other=0.0)
        group = tile * NUMBERS // group_size
        group_at = output * num_groups + group
        scale = tl.load(scales + group_at, mask=is_output, other=0.0)
        if BITS == 4:
            pairs_begin = output * ((num_groups + 1) // 2) * group_size
            code_at = pairs_begin + (at - (group + 1) // 2 * group_size)[:, None]
            both = tl.load(codes + code_at, mask=is_output, other=0)
            code = (both.to(tl.int32) >> (group % 2 * 4)) & 15
            zero = tl.load(zeros + group_at, mask=is_output, other=0)
            integers = code - zero.to(tl.int32)
        else:
            code_at = output * num_in + at[:, None]
            integers = tl.load(codes + code_at, mask=is_output & is_in[:, None], other=0)
        products = tl.dot(numbers, integers.to(numbers.dtype), input_precision="ieee")
        result += products * scale
    return result


@triton.jit
def product_kernel(
    out,
    x,
    codes,
    scales,
    zeros,
    num_rows,
    num_out,
    num_in,
    num_groups,
    group_size,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Program (row tile, output tile): out [num_rows, num_out] = x [num_rows, num_in] times the
    weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    is_row = row < num_rows
    is_output = output < num_out
    x_rows = x + row.to(tl.int64)[:, None] * num_in
    result = tile_product(
        x_rows, is_row, codes, scales, zeros, output.to(tl.int64), is_output,
        num_in, num_groups, group_size, ROWS, OUT, NUMBERS, BITS,
    )  # fmt: skip
    out_at = row.to(tl.int64)[:, None] * num_out + output
    tl.store(out + out_at, result, mask=is_row[:, None] & is_output)


def product(x: Tensor, weight: Groups) -> Tensor:
    """x [T, in] times the weight: [T, out], in the dtype of x."""
    x = x.contiguous()
    num_rows, num_in = x.shape
    num_out, num_groups = weight.scales.shape
    group_size = num_in // num_groups
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_out, OUT))
    out = x.new_empty(num_rows, num_out)
    zeros = weight.scales if weight.zeros is None else weight.zeros  # scales are not read
    product_kernel[grid](
        out, x, weight.codes, weight.scales, zeros,
        num_rows, num_out, num_in, num_groups, group_size,
        ROWS, OUT, numbers_of(x, group_size), 8 if weight.zeros is None else 4,
    )  # fmt: skip
    return out


def numbers_of(x: Tensor, group_size: int) -> int:
    """The numbers of a row that a program reads at a time."""
    is_old = x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)
    most = FEW_NUMBERS if is_old or x.dtype == torch.float32 else NUMBERS
    return min(most, triton.next_power_of_2(group_size))
