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
def store_rows(rows, halves, x1, x2, mask, HEAD_DIM: tl.constexpr):
    """Stores a row of codes for each head, with its scale behind them. `rows` [heads, 1] is where
    they begin; x1 and x2 [heads, PADDED] are halves of its numbers, which begin at `halves`."""
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    zero = tl.sum(x1 * 0.0 + x2 * 0.0, 1)[:, None]  # NaN, if a number is not finite
    most = tl.max(tl.maximum(tl.abs(x1), tl.abs(x2)), 1)[:, None]
    scale = tl.maximum(most * STEP, SMALLEST_SCALE) + zero
    inverse = tl.div_rn(1.0, scale)
    first = tl.where(zero == 0, (x1 * inverse + TO_INTEGER) - TO_INTEGER, 0.0)
    second = tl.where(zero == 0, (x2 * inverse + TO_INTEGER) - TO_INTEGER, 0.0)
    tl.store(rows + halves, first.to(tl.int8), mask=mask)
    tl.store(rows + halves + HEAD_DIM // 2, second.to(tl.int8), mask=mask)
    tl.store(scales_at(rows, HEAD_DIM), scale, mask=tl.max(mask.to(tl.int32), 1)[:, None] > 0)
