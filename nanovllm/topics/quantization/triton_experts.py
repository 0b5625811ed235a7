"""The grouped product with matrices in 8 or 4 bits in Triton: see layers/triton_experts.py, and
triton_product.py for the numbers."""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.experts import Pairs
from nanovllm.layers.triton_experts import OUT, PAIRS, find_tile, tiles_of
from nanovllm.topics.quantization.groups import Groups
from nanovllm.topics.quantization.triton_product import numbers_of, tile_product


@triton.jit
def grouped_product_kernel(
    out,  # [P, num_out]
    x,
    codes,
    scales,
    zeros,
    rows,  # [P]
    starts,  # [E + 1]
    num_out,
    num_in,
    num_groups,
    group_size,
    num_experts,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BITS: tl.constexpr,
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
        result = tile_product(
            x + row[:, None] * num_in, is_pair, codes, scales, zeros,
            expert.to(tl.int64) * num_out + output, is_output,
            num_in, num_groups, group_size, PAIRS, OUT, NUMBERS, BITS,
        )  # fmt: skip
        out_at = pair.to(tl.int64)[:, None] * num_out + output
        mask = is_pair[:, None] & is_output
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=mask)


def product(x: Tensor, _: Tensor, pairs: Pairs, weight: Groups, num_experts: int) -> Tensor:
    """x [T, in] -> [P, out], with the matrices of all experts, one below the other."""
    num_in = x.shape[1]
    num_rows, num_groups = weight.scales.shape
    num_out = num_rows // num_experts
    group_size = num_in // num_groups
    starts, num_tiles = tiles_of(pairs, num_experts)
    out = x.new_empty(len(pairs.rows), num_out)
    zeros = weight.scales if weight.zeros is None else weight.zeros  # scales are not read
    grouped_product_kernel[(num_tiles, triton.cdiv(num_out, OUT))](
        out, x, weight.codes, weight.scales, zeros, pairs.rows, starts,
        num_out, num_in, num_groups, group_size, num_experts,
        triton.next_power_of_2(num_experts), PAIRS, OUT, numbers_of(x, group_size),
        8 if weight.zeros is None else 4,
    )  # fmt: skip
    return out
