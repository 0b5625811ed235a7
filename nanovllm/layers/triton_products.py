"""Products in Triton with weights in 16, 8 or 4 bits: the grouped product of layers/experts.py, and
that of one weight.

Codes become numbers of the activations' dtype in registers, so only codes and scales are read from
memory. Sums are in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.experts import Pairs

FEW_ROWS = 16  # of activations, per program: tl.dot takes no fewer, nor fewer numbers
MANY_ROWS = 64  # where there are many: each tile of rows reads the whole weight
OUT = 64  # rows of a weight, per program; fewer of a narrow weight, for PROGRAMS of them
PROGRAMS = 128
NUMBERS = {16: 64, 8: 128, 4: 128}  # of a row at a time, by the bits of a weight
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
    with 4 or 8 bits a group of `group_size` numbers, or a part."""
    number = tl.arange(0, NUMBERS)
    result = tl.zeros([ROWS, OUT], tl.float32)
    for tile in range(tl.cdiv(num_in, NUMBERS)):
        at = tile * NUMBERS + number
        is_in = at < num_in
        numbers = tl.load(x_rows + at, mask=is_row[:, None] & is_in, other=0.0)
        group = tile * NUMBERS // group_size
        group_at = output * num_groups + group
        if BITS == 4:
            pairs_begin = output * ((num_groups + 1) // 2) * group_size
            code_at = pairs_begin + (at - (group + 1) // 2 * group_size)[:, None]
            both = tl.load(codes + code_at, mask=is_output, other=0)
            code = (both.to(tl.int32) >> (group % 2 * 4)) & 15
            zero = tl.load(zeros + group_at, mask=is_output, other=0)
            weights = code - zero.to(tl.int32)
        else:
            code_at = output * num_in + at[:, None]
            weights = tl.load(codes + code_at, mask=is_output & is_in[:, None], other=0)
        products = tl.dot(numbers, weights.to(numbers.dtype), input_precision="ieee")
        if BITS < 16:
            products *= tl.load(scales + group_at, mask=is_output, other=0.0)
        result += products
    return result


@triton.jit
def find_tile(ends, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The pairs of a program: their expert, the first pair, and the end of the expert's pairs. Each
    expert's pairs are cut into tiles. A program behind the last tile gets none."""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    has_begin = is_expert & (e > 0)
    begin = tl.load(ends + e - 1, mask=has_begin, other=0).to(tl.int32)
    end = tl.load(ends + e, mask=is_expert, other=0).to(tl.int32)
    tiles = tl.cdiv(end - begin, ROWS)
    last = tl.cumsum(tiles, 0)
    is_before = last <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    is_mine = e == expert
    before = tl.sum(tl.where(is_mine, last - tiles, 0), 0)
    first = tl.sum(tl.where(is_mine, begin, 0), 0)
    first += (tile - before) * ROWS
    end = tl.sum(tl.where(is_mine, end, 0), 0)
    return expert, first, end


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    out,  # [num_rows, num_out]
    x,  # [T, num_in]
    codes,  # of one weight, or of the matrices of all experts, one below the other
    scales,
    zeros,
    order,  # of pairs, and their ends: see experts.py. With one weight, they are not read
    ends,
    num_rows,
    num_out,
    num_in,
    num_groups,
    group_size,
    num_experts,
    EXPERTS: tl.constexpr,  # 0: one weight
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Program (row tile, output tile): rows of x times rows of the weight. A row tile has pairs of
    one expert."""
    first = tl.program_id(0) * ROWS
    end = num_rows
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    is_output = output < num_out
    weight_row = output.to(tl.int64)
    if EXPERTS:
        expert, first, end = find_tile(ends, num_experts, EXPERTS, ROWS)
        weight_row += expert.to(tl.int64) * num_out
    if first < end:
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        out_row = row.to(tl.int64)
        x_row = out_row
        if EXPERTS:
            pair = tl.load(order + row, mask=is_row, other=0)
            if TOP:
                x_row = pair // TOP
            else:
                out_row = pair
        result = tile_product(
            x + x_row[:, None] * num_in, is_row, codes, scales, zeros, weight_row, is_output,
            num_in, num_groups, group_size, ROWS, OUT, NUMBERS, BITS,
        )  # fmt: skip
        out_at = out_row[:, None] * num_out + output
        mask = is_row[:, None] & is_output
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=mask)


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    num_groups: int,
    bits: int,
    pairs: Pairs | None = None,
) -> Tensor:
    """x [T, in] times one weight: [T, out], in the dtype of x. With pairs, the weight has the
    matrices of all experts, one below the other, and the result is [P, out]."""
    x = x.contiguous()
    num_rows, num_in = x.shape
    num_experts = 0
    order = ends = x
    top = 0
    if pairs is not None:
        order, ends, top = pairs
        num_rows = len(order)
        num_experts = len(ends)
    num_matrices = max(num_experts, 1)
    num_out = len(codes) // num_matrices
    group_size = num_in // num_groups
    is_old = x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)
    most = FEW_NUMBERS if is_old or x.dtype == torch.float32 else NUMBERS[bits]
    has_many = num_rows >= 48 * num_matrices and most > FEW_NUMBERS
    tile_rows = MANY_ROWS if has_many else FEW_ROWS
    most = 64 if has_many else most  # with more, codes of 4 bits take too many registers
    num_tiles = most_tiles(num_rows, num_matrices, tile_rows)
    numbers = max(16, min(most, triton.next_power_of_2(group_size)))
    is_narrow = num_out < OUT * PROGRAMS and not has_many and pairs is None
    # the largest power of two
    tile_out = max(16, triton.next_power_of_2(num_out // PROGRAMS + 1) // 2) if is_narrow else OUT
    out = x.new_empty(num_rows, num_out)
    product_kernel[(num_tiles, triton.cdiv(num_out, tile_out))](
        out, x, codes, scales, zeros, order, ends,
        num_rows, num_out, num_in, num_groups, group_size, num_experts,
        triton.next_power_of_2(num_experts), top, tile_rows, tile_out, numbers, bits,
    )  # fmt: skip
    return out


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that there can be, whatever a router chooses: shapes alone decide it, so that
    a CUDA graph can record the launch."""
    partly = min(num_experts, num_pairs) * (tile_rows - 1)
    return triton.cdiv(num_pairs + (partly if num_experts > 1 else 0), tile_rows)
