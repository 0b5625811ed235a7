"""Sampling in Triton: sampler.py for a GPU (or, slowly, for a CPU with TRITON_INTERPRET=1)."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers import torch_sampler
from nanovllm.layers.sampler import Sampling

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x * LOG2_E)
SMALLEST = tl.constexpr(-3.4028234663852886e38)  # of fp32


@triton.jit
def mixed(x):
    """The mixing of sampler.uniform in uint64, the natural type for it."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def logits_of(row, token, VOCAB: tl.constexpr):
    """The logits of a tile of tokens in fp32; -inf behind the end of the row."""
    return tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh_kernel(
    maxima,  # [B, parts], and sums
    sums,
    logits,  # [B, VOCAB], rows may be apart; the others [B]
    lowest,
    temperature,
    row_stride,  # of logits
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (b, part): the maximum of TILE logits of row b, and the sum of their weights."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    x = logits_of(logits + b * row_stride, token, VOCAB)
    t = tl.load(temperature + b)
    scale = LOG2_E / (t + (t == 0))
    highest = tl.max(x, 0)
    # where all are -inf, the weights are 0, and not exp(-inf + inf)
    maximum = tl.where(highest > SMALLEST, highest, SMALLEST)
    weights = tl.exp2((x - maximum) * scale) * (x >= tl.load(lowest + b))
    part_at = b * tl.num_programs(1) + part
    tl.store(maxima + part_at, maximum)
    tl.store(sums + part_at, tl.sum(weights, 0))


@triton.jit
def sample_kernel(
    out,
    maxima,  # [B, PARTS], and sums: see weigh_kernel
    sums,
    logits,  # [B, VOCAB], rows may be apart; the others [B]
    lowest,
    temperature,
    seed,
    position,
    row_stride,  # of logits
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,  # >= PARTS
):
    """Program b samples the token of row b: first the part, then the token within it.

    It is the first one with which the sum of all weights passes a threshold.
    """
    b = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + b)
    scale = LOG2_E / (t + (t == 0))
    part = tl.arange(0, PADDED)
    is_part = part < PARTS
    highest = tl.load(maxima + b * PARTS + part, mask=is_part, other=float("-inf"))
    maximum = tl.max(highest, 0)
    in_part = tl.load(sums + b * PARTS + part, mask=is_part, other=0.0)
    in_part *= tl.exp2((highest - maximum) * scale)

    steps = tl.load(position + b).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = mixed(mixed(tl.load(seed + b).to(tl.uint64)) + steps) >> 41
    threshold = bits.to(tl.float32) / 8388608 * tl.sum(in_part, 0)  # 23 bits
    # by rounding, a sum may also pass it where a weight is 0
    is_behind = (tl.cumsum(in_part, 0) > threshold) & (in_part > 0)
    drawn = tl.where(t > 0, tl.min(tl.where(is_behind, part, PARTS), 0), PARTS)
    passed = tl.sum(tl.where(part < drawn, in_part, 0.0), 0)
    chosen = tl.where(drawn < PARTS, drawn, tl.argmax(highest, 0))

    token = chosen * TILE + tl.arange(0, TILE)
    x = logits_of(logits + b * row_stride, token, VOCAB)
    is_kept = x >= tl.load(lowest + b)
    weights = tl.exp2((x - maximum) * scale) * is_kept
    is_behind = (passed + tl.cumsum(weights, 0) > threshold) & (weights > 0)
    first = tl.min(tl.where(is_behind, token, VOCAB), 0)
    # ... or pass it only behind this part: then it is the last token with a weight
    first = tl.minimum(first, tl.max(tl.where(weights > 0, token, -1), 0))
    likeliest = chosen * TILE + tl.argmax(tl.where(is_kept, x, float("-inf")), 0)
    tl.store(out + b, tl.where((drawn < PARTS) & (first >= 0), first, likeliest))


@triton.jit
def ordered(x, SHIFT: tl.constexpr):
    """Integers in the order of these fp32 numbers. The last SHIFT bits are the same in all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def cutoff_kernel(
    lowest,  # [B], as the others
    logits,  # [B, VOCAB], rows may be apart
    temperature,
    top_p,
    min_p,
    row_stride,  # of logits
    SHIFT: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program b finds the lowest logit that row b keeps: torch_sampler.cutoff, without sorting.

    By bisection: do the tokens at or above a logit have enough weight?
    """
    b = tl.program_id(0).to(tl.int64)
    row = logits + b * row_stride
    i = tl.arange(0, TILE)
    t = tl.load(temperature + b)
    p = tl.load(top_p + b)
    least = tl.load(min_p + b)
    cut = float("-inf")
    if (t > 0) & ((p < 1) | (least > 0)):
        maximum = float("-inf")
        for begin in range(0, VOCAB, TILE):
            token = begin + i
            maximum = tl.maximum(maximum, tl.max(logits_of(row, token, VOCAB), 0))
        scale = LOG2_E / t
        low = ordered(tl.full((), float("-inf"), tl.float32), SHIFT)
        high = ordered(maximum, SHIFT)
        key = low  # the first sum is that of all tokens ...
        enough = tl.full((), -1.0, tl.float64)
        while (low < high) & (p < 1):
            total = tl.full((), 0.0, tl.float64)
            for begin in range(0, VOCAB, TILE):
                token = begin + i
                x = logits_of(row, token, VOCAB)
                weights = tl.exp2((x - maximum) * scale)
                is_above = (ordered(x, SHIFT) >= key) & (weights >= least)
                total += tl.sum(tl.where(is_above, weights, 0.0), 0).to(tl.float64)
            is_first = enough < 0
            low = tl.where(total >= enough, key, low)
            high = tl.where(total >= enough, high, key - 1)
            enough = tl.where(is_first, tl.maximum(p, 2e-38) * total, enough)
            key = low + (high - low + 1) // 2
            if is_first:  # ... and most of their weight is above this one
                likely = ordered(maximum - 16 * t, SHIFT)
                key = tl.minimum(tl.maximum(likely, low + 1), high)
        cut = maximum
        for begin in range(0, VOCAB, TILE):
            token = begin + i
            x = tl.load(row + token, mask=token < VOCAB, other=float("inf")).to(tl.float32)
            weights = tl.exp2((x - maximum) * scale)
            is_kept = (ordered(x, SHIFT) >= low) & (weights >= least)
            cut = tl.minimum(cut, tl.min(tl.where(is_kept, x, float("inf")), 0))
    tl.store(lowest + b, cut)


def cutoff(logits: Tensor, sampling: Sampling) -> Tensor:
    """See torch_sampler.cutoff, which sorts and waits for the device, unless top_k is small."""
    has_filter = not sampling.min_p is sampling.top_p is sampling.top_k is None
    if sampling.all_top_k_small or not has_filter:
        return torch_sampler.cutoff(logits, sampling)[0].float()
    num_rows, vocab_size = logits.shape
    top_p = torch.ones_like(sampling.temperature) if sampling.top_p is None else sampling.top_p
    min_p = torch.zeros_like(sampling.temperature) if sampling.min_p is None else sampling.min_p
    shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)  # bits that fp32 has more
    tile = min(4096, triton.next_power_of_2(vocab_size))
    lowest = torch.empty_like(sampling.temperature)
    cutoff_kernel[(num_rows,)](
        lowest, logits, sampling.temperature, top_p, min_p,
        logits.stride(0), shift, vocab_size, tile, num_warps=8,
    )  # fmt: skip
    if sampling.top_k is None:
        return lowest
    of_top_k, _ = torch_sampler.cutoff(logits, replace(sampling, all_top_k_small=True))
    return torch.where(sampling.top_k < vocab_size, of_top_k.squeeze(1).float(), lowest)


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    lowest = cutoff(logits, sampling)
    num_rows, vocab_size = logits.shape
    tile = min(4096, triton.next_power_of_2(vocab_size))
    parts = triton.cdiv(vocab_size, tile)
    maxima = lowest.new_empty(num_rows, parts)
    sums = torch.empty_like(maxima)  # at an aligned address: others want another kernel
    sizes = (logits.stride(0), vocab_size, tile)
    weigh_kernel[(num_rows, parts)](
        maxima, sums, logits, lowest, sampling.temperature, *sizes, num_warps=8
    )
    out = torch.empty_like(sampling.seed)
    sample_kernel[(num_rows,)](
        out, maxima, sums, logits, lowest, sampling.temperature, sampling.seed, sampling.position,
        *sizes, parts, triton.next_power_of_2(parts), num_warps=8,
    )  # fmt: skip
    return out
