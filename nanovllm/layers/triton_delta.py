"""Gated DeltaNet in Triton, for decodes and prompts: three launches a layer. The device needs no
number from the host. A part of a state is read once, and written once.

The tokens of a prompt are computed one after the other, as if each were a decode: so a prompt has
the same state however it is cut into chunks. Each program keeps its part of the state in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.layers.batch import Batch

CHANNELS = 128  # of the convolution, per program


@triton.jit
def tokens_of(cu_seqlens, context_lens, slots, seq):
    """The first token of a sequence, the one behind the last, its slot, and whether the slot holds
    what the sequence has computed before. Padding has slot 0."""
    start = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    slot = tl.load(slots + seq)
    is_old = (tl.load(context_lens + seq) > end - start) & (slot > 0)
    return start, end, slot, is_old


@triton.jit
def numbers_of(x, tail, token, oldest, start, end, is_channel, stride, ALL, WIDTH: tl.constexpr):
    """The numbers of these tokens, 0 before `oldest`. Those before `start` are in the tail."""
    is_before = (token >= oldest) & (token < start) & is_channel
    in_tail = tl.load(tail + (token - start + WIDTH) * ALL, mask=is_before, other=0.0)
    is_here = (token >= start) & (token < end) & is_channel
    numbers = tl.load(x + token * stride, mask=is_here, other=0.0).to(tl.float32)
    return tl.where(token < start, in_tail, numbers)


@triton.jit
def convolve_kernel(
    out,  # [T, ALL]
    x,  # [T, ALL], `stride` from token to token
    weight,  # [ALL, WIDTH + 1]
    tails,  # [slots, WIDTH, ALL]
    slots,
    cu_seqlens,
    context_lens,
    stride,
    ALL: tl.constexpr,  # channels
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (sequence, part): the convolution of CHANNELS channels, and SiLU; TOKENS tokens at a
    time. No other program reads these channels of the tail, so this one replaces them."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < ALL
    start, end, slot, is_old = tokens_of(cu_seqlens, context_lens, slots, seq)
    oldest = tl.where(is_old, start - WIDTH, start)
    x += channel
    tail = tails + slot * WIDTH * ALL + channel
    for begin in range(start, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)[:, None]
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for i in tl.static_range(WIDTH + 1):
            w = tl.load(weight + channel * (WIDTH + 1) + i, mask=is_channel, other=0.0)
            earlier = token - WIDTH + i
            total += w * numbers_of(
                x, tail, earlier, oldest, start, end, is_channel, stride, ALL, WIDTH
            )
        mask = (token < end) & is_channel
        tl.store(out + token * ALL + channel, total * tl.sigmoid(total), mask=mask)
    tl.debug_barrier()  # another thread may read what this one writes now
    if slot > 0:  # a padding row of a CUDA graph has none
        for i in tl.static_range(WIDTH):  # a number moves to a place that has been read
            token = end - WIDTH + i + tl.arange(0, 1)
            newest = numbers_of(x, tail, token, oldest, start, end, is_channel, stride, ALL, WIDTH)
            tl.store(tail + i * ALL, newest, mask=is_channel)


@triton.jit
def delta_kernel(
    out,  # [T, HEADS, VALUE_SIZE]
    qkv,  # [T, channels]
    ba,  # [T, 2 * HEADS]: see GatedDeltaNet
    decay_log,  # [HEADS], and so is bias
    bias,
    states,  # [slots, HEADS, KEY_SIZE, VALUE_SIZE]
    slots,
    cu_seqlens,
    context_lens,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_SIZE, padded
    VALUES: tl.constexpr,
):
    """Program (sequence, head, part): VALUES columns of a head's state, token by token."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, KEYS)
    j = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key = i < KEY_SIZE
    is_value = j < VALUE_SIZE
    start, end, slot, is_old = tokens_of(cu_seqlens, context_lens, slots, seq)
    state_at = states + ((slot * HEADS + head) * KEY_SIZE + i)[:, None] * VALUE_SIZE + j
    is_number = is_key[:, None] & is_value
    state = tl.zeros([KEYS, VALUES], tl.float32)
    if is_old:
        state = tl.load(state_at, mask=is_number, other=0.0)
    speed = -tl.exp(tl.load(decay_log + head))
    shift = tl.load(bias + head)
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    for token in tl.range(start, end, num_stages=3):
        begin = qkv + token * (2 * NUM_KEYS + HEADS * VALUE_SIZE)
        key_at = begin + head // (HEADS // KEY_HEADS) * KEY_SIZE + i
        q = tl.load(key_at, mask=is_key, other=0.0)
        k = tl.load(key_at + NUM_KEYS, mask=is_key, other=0.0)
        v = tl.load(begin + 2 * NUM_KEYS + head * VALUE_SIZE + j, mask=is_value, other=0.0)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)

        beta = tl.sigmoid(tl.load(ba + token * 2 * HEADS + head).to(tl.float32))
        a = tl.load(ba + token * 2 * HEADS + HEADS + head).to(tl.float32) + shift
        softplus = tl.where(a > 20, a, tl.log(1 + tl.exp(tl.minimum(a, 20))))
        state *= tl.exp(speed * softplus)
        held = tl.sum(k[:, None] * state, 0)
        state += k[:, None] * ((v - held) * beta)
        result = tl.sum(q[:, None] * state, 0)
        tl.store(out + (token * HEADS + head) * VALUE_SIZE + j, result, mask=is_value)
    if slot > 0:
        tl.store(state_at, state, mask=is_number)


@triton.jit
def gate_kernel(
    out,  # [T, heads, SIZE]
    values,
    z,  # [T, heads, SIZE], `stride` from token to token
    weight,  # [SIZE]
    eps,
    stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program (t, head): the norm of a head's values, times silu(z)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, PADDED)
    is_number = i < SIZE
    at = (t * tl.num_programs(1) + head) * SIZE + i
    x = tl.load(values + at, mask=is_number, other=0.0)
    gate = tl.load(z + t * stride + head * SIZE + i, mask=is_number, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=is_number, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * w
    tl.store(out + at, (normed * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=is_number)


def delta_layer(layer: Any, qkvz: Tensor, ba: Tensor, batch: Batch) -> Tensor:
    """Computes delta_layer in topics/hybrid/delta.py."""
    tails, states = [kind[layer.index] for kind in batch.kv_cache.states]
    key_heads, key_size = layer.key_sizes
    heads, _, value_size = states.shape[1:]
    channels, num_values = layer.sizes
    num_tokens = len(qkvz)
    num_seqs = len(batch.context_lens)
    has_chunks = batch.num_decodes < num_seqs
    sequences = (batch.state_slots, batch.cu_seqlens_q, batch.context_lens)
    qkv = qkvz.new_empty(num_tokens, channels, dtype=torch.float32)
    convolve_kernel[(num_seqs, triton.cdiv(channels, CHANNELS))](
        qkv, qkvz, layer.conv1d.weight, tails, *sequences, qkvz.stride(0),
        channels, tails.shape[1], 16 if has_chunks else 1, CHANNELS,
    )  # fmt: skip
    # one warp reads the tokens of a prompt without waiting for others; more warps read one faster
    columns, warps = (8, 1) if has_chunks else (32, 4)
    values = qkv.new_empty(num_tokens, heads, value_size)
    delta_kernel[(num_seqs, heads, triton.cdiv(value_size, columns))](
        values, qkv, ba, layer.A_log, layer.dt_bias, states, *sequences, key_size**-0.5,
        key_heads, heads, key_size, value_size, triton.next_power_of_2(key_size), columns,
        num_warps=warps,
    )  # fmt: skip
    gated = qkvz.new_empty(num_tokens, num_values)
    gate_kernel[(num_tokens, heads)](
        gated, values, qkvz[:, channels:], layer.norm.weight, layer.norm.eps, qkvz.stride(0),
        value_size, triton.next_power_of_2(value_size), num_warps=1,
    )  # fmt: skip
    return gated
