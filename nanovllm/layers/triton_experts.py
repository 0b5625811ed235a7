"""What is around the products of experts, in Triton. What the functions compute: see experts.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

OTHERS = 16  # experts that all are compared with at a time
PART = 1024  # of the numbers of a row, per program


@triton.jit
def choose_kernel(
    weights,  # [T, TOP], and chosen
    chosen,
    logits,  # [T, num_experts]
    num_experts,
    TOP: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    EXPERTS: tl.constexpr,  # >= num_experts, a power of two
    OTHERS: tl.constexpr,
):
    """Program t: the place of an expert is the number of those before it. Of equal ones, the first
    come first."""
    t = tl.program_id(0).to(tl.int64)
    logits += t * num_experts
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    x = tl.load(logits + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    rank = tl.where(x == x, x, float("inf"))  # NaN comes first, as PyTorch sorts it
    place = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_experts, OTHERS):
        other = begin + tl.arange(0, OTHERS)
        y = tl.load(logits + other, mask=other < num_experts, other=float("-inf")).to(tl.float32)
        y = tl.where(y == y, y, float("inf"))
        is_before = y[None, :] > rank[:, None]
        is_before |= (y[None, :] == rank[:, None]) & (other[None, :] < expert[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    is_chosen = (place < TOP) & is_expert
    weight = tl.exp(x - tl.max(x, 0))
    if IS_NORMALIZED:
        weight = tl.where(is_chosen, weight, 0.0)
    at = t * TOP + place
    tl.store(weights + at, weight / tl.sum(weight, 0), mask=is_chosen)
    tl.store(chosen + at, expert.to(tl.int64), mask=is_chosen)


@triton.jit
def add_up_kernel(
    out,  # [T, SIZE]
    y,  # [T, TOP, SIZE]
    weights,  # [T, TOP]
    TOP: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
):
    """Program (t, part): the weighted sum over the experts of a token."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * PART + tl.arange(0, PART)
    is_number = i < SIZE
    total = tl.zeros([PART], tl.float32)
    for pair in range(TOP):
        at = y + (t * TOP + pair) * SIZE + i
        numbers = tl.load(at, mask=is_number, other=0.0).to(tl.float32)
        total += numbers * tl.load(weights + t * TOP + pair)
    tl.store(out + t * SIZE + i, total.to(out.dtype.element_ty), mask=is_number)


def choose(logits: Tensor, top: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty(num_tokens, top, dtype=torch.float32)
    chosen = torch.empty_like(weights, dtype=torch.int64)
    choose_kernel[(num_tokens,)](
        weights, chosen, logits, num_experts, top, is_normalized,
        triton.next_power_of_2(num_experts), OTHERS,
    )  # fmt: skip
    return weights, chosen


def add_up(y: Tensor, weights: Tensor) -> Tensor:
    weights = weights.contiguous()
    num_tokens, top = weights.shape
    size = y.shape[1]
    out = y.new_empty(num_tokens, size)
    part = min(PART, triton.next_power_of_2(size))
    add_up_kernel[(num_tokens, triton.cdiv(size, part))](out, y, weights, top, size, part)
    return out
