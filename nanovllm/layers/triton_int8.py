"""topics/quantization/kv_cache.py in Triton, and what attention reads of its rows."""

import triton
import triton.language as tl
from torch import Tensor

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
def store_row(row, numbers, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Stores HEAD_DIM numbers as codes, with their scale behind them."""
    i = tl.arange(0, DIM)
    is_number = i < HEAD_DIM
    x = tl.load(numbers + i, mask=is_number, other=0.0).to(tl.float32)
    zero = tl.sum(x * 0.0, 0)  # NaN, if a number is not finite
    scale = tl.maximum(tl.max(tl.abs(x), 0) * STEP, SMALLEST_SCALE) + zero
    inverse = tl.div_rn(1.0, scale)
    codes = (x * inverse + TO_INTEGER) - TO_INTEGER
    codes = tl.where(zero == 0, codes, 0.0)
    tl.store(row + i, codes.to(tl.int8), mask=is_number)
    tl.store(scales_at(row, HEAD_DIM), scale)


@triton.jit
def store_int8_kernel(
    k,
    v,
    k_cache,  # rows of HEAD_DIM + 4 bytes, and so is v_cache
    v_cache,
    slots,
    k_stride,
    v_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (t, head) stores the key and value of token t and one KV head in its slot."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:  # a padding row of a CUDA graph has none
        row = (slot * tl.num_programs(1) + head) * (HEAD_DIM + 4)
        store_row(k_cache + row, k + t * k_stride + head * HEAD_DIM, HEAD_DIM, DIM)
        store_row(v_cache + row, v + t * v_stride + head * HEAD_DIM, HEAD_DIM, DIM)


def store_int8(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Stores k and v [T, num_kv_heads, head_dim] in the int8 cache of a layer."""
    num_tokens, num_kv_heads, head_dim = k.shape
    store_int8_kernel[(num_tokens, num_kv_heads)](
        k,
        v,
        keys,
        values,
        slots,
        k.stride(0),
        v.stride(0),
        head_dim,
        triton.next_power_of_2(head_dim),
        num_warps=1,
    )
