"""The grouped product of layers/experts.py in Triton: one launch for all experts. Its shape does
not depend on what a router chooses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.experts import Pairs

PAIRS = 16  # of an expert, per program: tl.dot takes no fewer
OUT = 64  # rows of a matrix, per program
NUMBERS = 64  # of a row at a time
FEW_NUMBERS = 32  # where more would take too many registers


@triton.jit
def find_tile(starts, num_experts, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """The pairs of a program: its expert, the first pair, and the end of the expert's pairs. Each
    expert's pairs are cut into tiles. A program behind the last tile gets expert EXPERTS."""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    is_expert = e < num_experts
    begin = tl.load(starts + e, mask=is_expert, other=0)
    end = tl.load(starts + e + 1, mask=is_expert, other=0)
    tiles = tl.cdiv(end - begin, PAIRS)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    is_mine = e == expert
    before = tl.sum(tl.where(is_mine, last - tiles, 0), 0)
    first = tl.sum(tl.where(is_mine, begin, 0), 0) + (tile - before) * PAIRS
    return expert, first, tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit
def grouped_kernel(
    out,  # [P, num_out]
    x,  # [T, num_in]
    matrices,  # [E, num_out, num_in]
    rows,  # [P]
    starts,  # [E + 1]: where the pairs of each expert begin, and their number
    num_out,
    num_in,
    num_experts,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Program (tile, output tile): out[p] = x[rows[p]] times the matrix of an expert, for PAIRS of
    its pairs."""
    expert, first, end = find_tile(starts, num_experts, EXPERTS, PAIRS)
    if expert < num_experts:
        pair = first + tl.arange(0, PAIRS)
        is_pair = pair < end
        output = tl.program_id(1) * OUT + tl.arange(0, OUT)
        is_output = output < num_out
        row = tl.load(rows + pair, mask=is_pair, other=0).to(tl.int64)
        x_rows = x + row[:, None] * num_in
        columns = matrices + (expert.to(tl.int64) * num_out + output) * num_in
        result = tl.zeros([PAIRS, OUT], tl.float32)
        for tile in range(tl.cdiv(num_in, NUMBERS)):
            at = tile * NUMBERS + tl.arange(0, NUMBERS)
            is_in = at < num_in
            numbers = tl.load(x_rows + at, mask=is_pair[:, None] & is_in, other=0.0)
            mask = is_output & is_in[:, None]
            weights = tl.load(columns + at[:, None], mask=mask, other=0.0)
            result += tl.dot(numbers, weights, input_precision="ieee")
        out_at = pair.to(tl.int64)[:, None] * num_out + output
        mask = is_pair[:, None] & is_output
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=mask)


def tiles_of(pairs: Pairs, num_experts: int) -> tuple[Tensor, int]:
    """Where the pairs of each expert begin, int32 [E + 1], and the most tiles that there can be,
    which shapes alone decide."""
    experts = torch.arange(num_experts + 1, device=pairs.experts.device)
    starts = torch.searchsorted(pairs.experts, experts, out_int32=True)
    num_pairs = len(pairs.experts)
    return starts, triton.cdiv(num_pairs + min(num_experts, num_pairs) * (PAIRS - 1), PAIRS)


def product(x: Tensor, matrices: Tensor, pairs: Pairs) -> Tensor:
    """x [T, in], matrices [E, out, in] -> [P, out]: see experts.product."""
    num_experts, num_out, num_in = matrices.shape
    starts, num_tiles = tiles_of(pairs, num_experts)
    is_old = x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)
    most = FEW_NUMBERS if is_old or x.dtype == torch.float32 else NUMBERS
    out = x.new_empty(len(pairs.rows), num_out)
    grouped_kernel[(num_tiles, triton.cdiv(num_out, OUT))](
        out, x, matrices, pairs.rows, starts, num_out, num_in, num_experts,
        triton.next_power_of_2(num_experts), PAIRS, OUT, most,
    )  # fmt: skip
    return out
