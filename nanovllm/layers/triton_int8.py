"""topics/quantization/kv_cache.py in Triton, and what attention reads of its rows."""

import triton
import triton.language as tl

STEP = tl.constexpr(1 / 127)
SMALLEST_SCALE = tl.constexpr(1e-30)
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # an fp32 that is so large has no fraction


@triton.jit
def scales_at(rows, HEAD_DIM: tl.constexpr):
    """The addresses of the scales, behind the codes of rows that begin at these addresses."""
    behind = rows + HEAD_DIM
    return behind.to(tl.pointer_type(tl.float32))


@triton.jit
def scales_of(rows, is_row, HEAD_DIM: tl.constexpr):
    return tl.load(scales_at(rows, HEAD_DIM), mask=is_row, other=0.0)


@triton.jit
def codes_of(x, inverse, zero):
    """The codes of a row's numbers, given the inverse of its scale; 0 if `zero` is NaN."""
    codes = x * inverse + TO_INTEGER
    codes = codes - TO_INTEGER
    codes = tl.where(zero == 0, codes, 0.0)
    return codes.to(tl.int8)


@triton.jit
def store_rows(
    rows,  # [heads, 1]: where they begin
    halves,  # [PADDED]: the places of the first half's numbers in a row
    x1,  # [heads, PADDED]: the first halves
    x2,
    mask,
    HEAD_DIM: tl.constexpr,
):
    """Stores a row of codes for each head, with its scale behind them."""
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    zero = tl.sum(x1 * 0.0 + x2 * 0.0, 1)  # NaN, if a number is not finite
    larger = tl.maximum(tl.abs(x1), tl.abs(x2))
    scale = tl.maximum(tl.max(larger, 1) * STEP, SMALLEST_SCALE) + zero
    scale = scale[:, None]
    zero = zero[:, None]
    inverse = tl.div_rn(1.0, scale)
    at = rows + halves
    tl.store(at, codes_of(x1, inverse, zero), mask=mask)
    at += HEAD_DIM // 2
    tl.store(at, codes_of(x2, inverse, zero), mask=mask)
    is_row = tl.max(mask.to(tl.int32), 1)
    tl.store(scales_at(rows, HEAD_DIM), scale, mask=is_row[:, None] > 0)
