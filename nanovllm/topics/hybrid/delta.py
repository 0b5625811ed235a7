"""Gated DeltaNet (Yang et al., 2024): a layer whose memory does not grow.

Each head has a state: a matrix that maps keys to values. A token lets the state decay, reads what
the state holds for its key, and writes a part of the difference to its value (the delta rule):

    S = decay * S
    S = S + beta * k (v - k S)
    out = q S

A decode does just that. `chunked` computes the same for all tokens of a prompt with matrix
products.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops

CHUNK = 64  # tokens that `chunked` computes together


class StateRows:
    """Where the tokens of a step lie, and which slot each sequence has: once for all layers.

    `width` is the number of earlier tokens that the convolution reads: the tail. Each sequence's
    tail is put before its tokens.
    """

    def __init__(self, batch: Batch, width: int):
        assert batch.state_slots is not None
        self.slots = batch.state_slots
        self.num_decodes = batch.num_decodes
        counts = batch.cu_seqlens_q.diff()
        num_seqs = len(counts)
        num_tokens = len(batch.slot_mapping)
        device = counts.device
        first = batch.cu_seqlens_q[:-1]
        # what the slot holds is of an earlier owner, or of padding, whose slot is 0
        self.is_new = (batch.context_lens <= counts) | (self.slots == 0)
        seq = torch.arange(num_seqs, device=device)
        seq_of_token = torch.repeat_interleave(seq, counts, output_size=num_tokens)
        token = torch.arange(num_tokens, device=device)
        self.tokens = token + width * (seq_of_token + 1)
        begins = first + width * seq
        places = torch.arange(width, device=device)
        self.tails = begins.unsqueeze(1) + places
        self.next_tails = self.tails + counts.unsqueeze(1)
        self.chunks: list[tuple[int, slice]] = []  # sequences with more than one token
        if self.num_decodes < num_seqs:
            ends = batch.cu_seqlens_q.tolist()
            for b in range(self.num_decodes, num_seqs):
                tokens = slice(ends[b], ends[b + 1])
                self.chunks.append((b, tokens))


@dataclass
class StateBatch(Batch):
    """A batch of a model with states."""

    width: int = field(kw_only=True)  # of a tail

    @cached_property
    def rows(self) -> StateRows:
        return StateRows(self, self.width)


def state_shapes(hf_config) -> list[tuple[int, ...]]:
    """The shapes of what a sequence has in a layer: a tail [width, channels], and states [value
    heads, key size, value size]."""
    key_size = hf_config.linear_key_head_dim
    value_size = hf_config.linear_value_head_dim
    num_keys = hf_config.linear_num_key_heads * key_size
    heads = hf_config.linear_num_value_heads
    width = hf_config.linear_conv_kernel_dim - 1
    channels = 2 * num_keys + heads * value_size
    return [(width, channels), (heads, key_size, value_size)]


class GatedDeltaNet(nn.Module):
    """The layer with this index, among those with states."""

    def __init__(self, hf_config, index: int, ops: Ops):
        super().__init__()
        self.index = index
        (width, channels), (heads, _, value_size) = state_shapes(hf_config)
        self.key_sizes = (hf_config.linear_num_key_heads, hf_config.linear_key_head_dim)
        num_values = heads * value_size
        self.sizes = [channels, num_values]  # of qkv and z
        parts = {
            "in_proj_qkv": channels,
            "in_proj_z": num_values,
        }
        gates = {
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        self.in_proj_qkvz = Linear(hf_config.hidden_size, parts)
        self.in_proj_ba = Linear(hf_config.hidden_size, gates)
        self.conv1d = nn.Conv1d(channels, channels, width + 1, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(value_size, hf_config.rms_norm_eps)
        self.out_proj = Linear(num_values, hf_config.hidden_size)
        self.ops = ops

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """x [T, hidden_size] -> the same shape. Advances the states of the step's sequences."""
        assert isinstance(batch, StateBatch), "HybridModel makes one of each batch"
        qkvz = self.in_proj_qkvz(x)
        ba = self.in_proj_ba(x)
        return self.out_proj(self.ops.delta_rule(self, qkvz, ba, batch))


def delta_layer(
    decode: Callable,
    layer: GatedDeltaNet,
    qkvz: Tensor,
    ba: Tensor,
    batch: StateBatch,
) -> Tensor:
    """What a GatedDeltaNet computes between its products: [T, values] in the dtype of qkvz."""
    rows = batch.rows
    # [slots, width, channels] and [slots, value heads, key size, value size], fp32
    tails, states = [kind[layer.index] for kind in batch.kv_cache.states]
    qkv, z = qkvz.split(layer.sizes, 1)
    b, a = ba.float().chunk(2, 1)
    weight = layer.conv1d.weight.squeeze(1)
    qkv = convolve(qkv, weight, tails, rows)
    speed = layer.A_log.exp()
    log_decay = -speed * F.softplus(a + layer.dt_bias)
    gates = (log_decay, b.sigmoid())
    values = attend(qkv, *gates, layer.key_sizes, states, rows, decode)
    normed = layer.norm(values).flatten(1)
    gated = normed * F.silu(z.float())
    return gated.to(qkvz.dtype)


def attend(
    qkv: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    sizes: tuple[int, int],
    states: Tensor,
    rows: StateRows,
    decode: Callable,
) -> Tensor:
    """The delta rule for all tokens: [T, value heads, value size] fp32."""
    n = rows.num_decodes
    parts = []
    if n:
        decodes = (qkv[:n], log_decay[:n], beta[:n])
        slots = (rows.slots[:n], rows.is_new[:n])
        parts.append(decode(*decodes, sizes, states, *slots))
    for b, tokens in rows.chunks:
        slot = rows.slots[b : b + 1]  # for a number, the host would wait for the device
        state = states[slot].squeeze(0).masked_fill(rows.is_new[b], 0)
        heads = heads_of(qkv[tokens], sizes, states.shape[1])
        inputs = (*heads, log_decay[tokens], beta[tokens])
        by_head = [part.transpose(0, 1) for part in inputs]
        by_head.append(state)
        out, state = chunked(*by_head)
        states[slot] = state.unsqueeze(0)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def convolve(x: Tensor, weight: Tensor, tails: Tensor, rows: StateRows) -> Tensor:
    """The causal convolution of each channel, and SiLU: x [T, channels] -> the same in fp32.

    Reads the tail of each sequence, and replaces it by its newest tokens.
    """
    num_tokens, num_channels = x.shape
    width = rows.tails.shape[1]
    num_rows = num_tokens + rows.tails.numel()
    padded = torch.empty(num_rows, num_channels, device=x.device)
    before = tails[rows.slots]
    padded[rows.tails] = before.masked_fill(rows.is_new[:, None, None], 0)
    padded[rows.tokens] = x.float()
    tails[rows.slots] = padded[rows.next_tails]
    out = padded[rows.tokens] * weight[:, width]
    for i in range(width):
        earlier = padded[rows.tokens - width + i]
        out.addcmul_(earlier, weight[:, i])
    return F.silu(out)


def heads_of(qkv: Tensor, sizes: tuple[int, int], value_heads: int) -> tuple[Tensor, ...]:
    """Splits qkv [n, channels] into q, k and v [n, value heads, size]. Heads of q and k have length
    1, and q is scaled. Several value heads share a key head."""
    key_heads, key_size = sizes
    num_keys = key_heads * key_size
    num_values = qkv.shape[1] - 2 * num_keys
    qk, v = qkv.split([2 * num_keys, num_values], 1)
    qk = qk.unflatten(1, (2 * key_heads, key_size))
    squares = qk.square().sum(-1, keepdim=True)
    qk = qk * torch.rsqrt(squares + 1e-6)
    # each key head is that of several value heads
    group = value_heads // key_heads
    q, k = qk.repeat_interleave(group, 1).chunk(2, 1)
    scale = key_size**-0.5
    return q * scale, k, v.unflatten(1, (value_heads, -1))


def decode(
    qkv: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    sizes: tuple[int, int],
    states: Tensor,
    slots: Tensor,
    is_new: Tensor,
) -> Tensor:
    """One token of each of n sequences: [n, value heads, value size].

    qkv [n, channels], log_decay and beta [n, value heads], all in fp32; slots and is_new [n]. A new
    sequence has a state of zeros. `sizes` are the number of key heads, and their size.
    """
    q, k, v = heads_of(qkv, sizes, states.shape[1])
    state = states[slots]
    state.masked_fill_(is_new[:, None, None, None], 0)
    decay = log_decay.exp()
    state *= decay[..., None, None]
    held = (k.unsqueeze(-2) @ state).squeeze(-2)
    correction = (v - held) * beta.unsqueeze(-1)
    state.addcmul_(k.unsqueeze(-1), correction.unsqueeze(-2))
    states[slots] = state
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """n tokens of one sequence, CHUNK at a time: the values [heads, n, value size], and the state
    behind them.

    q, k [heads, n, key size], v [heads, n, value size], log_decay and beta [heads, n], state
    [heads, key size, value size]; all in fp32. What a token of a chunk writes depends on what the
    tokens before it have written: a triangular system of equations. So all corrections of a chunk
    come from one solution, and the state changes once for each chunk.
    """
    num_tokens = q.shape[1]
    padding = -num_tokens % CHUNK  # tokens that neither read, write nor decay
    gates = (log_decay.unsqueeze(-1), beta.unsqueeze(-1))
    parts = []
    for x in (q, k, v, *gates):
        padded = F.pad(x, (0, 0, 0, padding))
        parts.append(padded.unflatten(1, (-1, CHUNK)))
    q, k, v, log_decay, beta = parts
    # the logarithm of all decays since the chunk's begin; in fp32, differences would lose digits
    since = log_decay.double().cumsum(-2)
    differences = (since - since.mT).float()
    between = differences.tril().exp().tril()
    decay = since.float().exp()

    k_beta = k * beta
    system = k_beta @ k.mT * between  # its diagonal counts as 1
    wanted = torch.cat([v * beta, k_beta * decay], -1)
    solved = torch.linalg.solve_triangular(
        system,
        wanted,
        upper=False,
        unitriangular=True,
    )
    sizes = [v.shape[-1], k.shape[-1]]
    corrections, reads = solved.split(sizes, -1)
    scores = q @ k.mT * between
    q = q * decay
    last = since[..., -1:, :]
    k = k * (last - since).float().exp()
    values = []
    for i in range(q.shape[1]):
        held = reads[:, i] @ state
        correction = corrections[:, i] - held
        before = q[:, i] @ state
        within = scores[:, i] @ correction
        values.append(before + within)
        state = state * decay[:, i, -1:]
        state = state + k[:, i].mT @ correction
    out = torch.cat(values, 1)
    return out[:, :num_tokens], state
