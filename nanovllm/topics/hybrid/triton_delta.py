"""A decode by the gated delta rule in Triton: a part of a state is read once, and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 32  # columns of a state, per program


@triton.jit
def delta_kernel(
    out,  # [B, HEADS, VALUE_SIZE]
    qkv,  # [B, channels]
    log_decay,  # [B, HEADS], and so is beta
    beta,
    states,  # [slots, HEADS, KEY_SIZE, VALUE_SIZE]
    slots,
    is_new,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_SIZE, padded
    VALUES: tl.constexpr,
):
    """Program (row, head, part): VALUES columns of a head's state."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, KEYS)
    j = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key = i < KEY_SIZE
    is_value = j < VALUE_SIZE
    NUM_KEYS: tl.constexpr = KEY_HEADS * KEY_SIZE
    begin = qkv + row * (2 * NUM_KEYS + HEADS * VALUE_SIZE)
    key_at = begin + head // (HEADS // KEY_HEADS) * KEY_SIZE + i
    q = tl.load(key_at, mask=is_key, other=0.0)
    k = tl.load(key_at + NUM_KEYS, mask=is_key, other=0.0)
    v = tl.load(begin + 2 * NUM_KEYS + head * VALUE_SIZE + j, mask=is_value, other=0.0)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)

    slot = tl.load(slots + row)
    state_at = states + ((slot * HEADS + head) * KEY_SIZE + i)[:, None] * VALUE_SIZE + j
    is_number = is_key[:, None] & is_value
    state = tl.zeros([KEYS, VALUES], tl.float32)
    if tl.load(is_new + row) == 0:
        state = tl.load(state_at, mask=is_number, other=0.0)
    state *= tl.exp(tl.load(log_decay + row * HEADS + head))
    held = tl.sum(k[:, None] * state, 0)
    correction = (v - held) * tl.load(beta + row * HEADS + head)
    state += k[:, None] * correction
    if slot > 0:  # a padding row of a CUDA graph has none
        tl.store(state_at, state, mask=is_number)
    result = tl.sum(q[:, None] * state, 0)
    tl.store(out + (row * HEADS + head) * VALUE_SIZE + j, result, mask=is_value)


def decode(
    qkv: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    sizes: tuple[int, int],
    states: Tensor,
    slots: Tensor,
    is_new: Tensor,
) -> Tensor:
    """Computes delta.decode."""
    key_heads, key_size = sizes
    heads, _, value_size = states.shape[1:]
    out = torch.empty(len(qkv), heads, value_size, device=qkv.device)
    inputs = (qkv.contiguous(), log_decay.contiguous(), beta.contiguous())
    keys = triton.next_power_of_2(key_size)
    delta_kernel[(len(qkv), heads, triton.cdiv(value_size, VALUES))](
        out, *inputs, states, slots, is_new.view(torch.uint8), key_size**-0.5,
        key_heads, heads, key_size, value_size, keys, VALUES,
    )  # fmt: skip
    return out
