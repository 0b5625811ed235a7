"""The gated delta rule: its two forms against each other and against transformers, and the convolution.

Run: pytest tests/hybrid/test_delta.py
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from backends import backends, device_of, ops_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from nanovllm.backends import torch_ops
from nanovllm.layers.kv_cache import KVCache
from nanovllm.topics.hybrid import delta

HEADS, SIZES = 4, (2, 8)  # value heads; key heads and their size
CHANNELS = 2 * 2 * 8 + HEADS * 12


def inputs(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """qkv, log_decay and beta of one sequence. Some decays forget nearly nothing, some nearly all."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, CHANNELS, generator=generator)
    log_decay = -(torch.rand(num_tokens, HEADS, generator=generator) ** 4) * 20
    return qkv, log_decay, torch.rand(num_tokens, HEADS, generator=generator)


def one_by_one(qkv, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.stack([torch.full_like(state, torch.nan), state])
    slot, old = torch.tensor([1]), torch.tensor([False])
    out = [
        delta.decode(
            qkv[t : t + 1], log_decay[t : t + 1], beta[t : t + 1], SIZES, states, slot, old
        )
        for t in range(len(qkv))
    ]
    return torch.cat(out), states[1]


def in_chunks(qkv, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    heads = (*delta.heads_of(qkv, SIZES, HEADS), log_decay, beta)
    out, state = delta.chunked(*(part.transpose(0, 1) for part in heads), state)
    return out.transpose(0, 1), state


@pytest.mark.parametrize("num_tokens", [1, 3, 63, 64, 65, 200])
def test_both_forms_equal_transformers(num_tokens):
    qkv, log_decay, beta = inputs(num_tokens)
    state = torch.randn(HEADS, 8, 12)
    q, k, v = (x.unflatten(1, (-1, n)) for x, n in zip(qkv.split([16, 16, 48], 1), (8, 8, 12)))
    q, k = (x.repeat_interleave(HEADS // 2, 1) for x in (q, k))
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    for rule in (oracle.torch_recurrent_gated_delta_rule, oracle.torch_chunk_gated_delta_rule):
        batch = (x.unsqueeze(0) for x in (q, k, v))
        rest = dict(g=log_decay[None], beta=beta[None], initial_state=state[None])
        expected, last = rule(*batch, **rest, **options)
        for form in (one_by_one, in_chunks):
            out, new_state = form(qkv, log_decay, beta, state)
            torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(new_state, last[0], atol=2e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(0, 99))
@example([1, 49, 58], 46)  # decays whose sums are large
def test_in_any_chunking_the_same(lengths, seed):
    whole = inputs(sum(lengths), seed)
    state = torch.zeros(HEADS, 8, 12)
    expected, last = in_chunks(*whole, state)
    parts = []
    for chunk in zip(*(x.split(lengths) for x in whole)):
        form = one_by_one if len(chunk[0]) == 1 else in_chunks
        out, state = form(*chunk, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state, last, atol=1e-6, rtol=1e-5)


def batch_of(counts, starts, slots, width, states=(), device="cpu") -> delta.StateBatch:
    ends = torch.tensor([0, *counts], device=device).cumsum(0)
    contexts = [start + count for start, count in zip(starts, counts)]
    return delta.StateBatch(
        kv_cache=KVCache(torch.zeros(2, 1, 1, 1, 1, 1), states),
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
        cu_seqlens_q=ends.int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        cu_blocks=torch.zeros(len(counts) + 1, dtype=torch.int32),
        state_slots=torch.tensor(slots, device=device),
        block_tables=torch.zeros(0, dtype=torch.int32),
        num_decodes=sum(count == 1 for count in counts),
        width=width,
    )


@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_convolution_reads_the_tail_of_its_own_sequence(width):
    """Three sequences in chunks of several lengths, some shorter than the tail. Slots hold NaN before their first use."""
    weight, sequences = (
        torch.randn(6, width + 1),
        [torch.randn(9, 6), torch.randn(7, 6), torch.randn(8, 6)],
    )
    tails = torch.full((5, width, 6), torch.nan)
    done = [0, 0, 0]
    results: list[list] = [[], [], []]
    for counts in ([1, 2, 5], [1, 1, 2], [1, 4, 1], [6, 0, 0]):
        running = sorted((b for b in range(3) if counts[b]), key=lambda b: counts[b] > 1)
        chosen = [counts[b] for b in running]
        starts = [done[b] for b in running]
        rows = batch_of(chosen, starts, [3 - b for b in running], width).rows
        x = torch.cat([sequences[b][done[b] : done[b] + counts[b]] for b in running])
        for b, part in zip(running, delta.convolve(x, weight, tails, rows).split(chosen)):
            results[b].append(part)
            done[b] += counts[b]
    for sequence, parts in zip(sequences, results):
        padded = F.pad(sequence.T, (width, 0))
        expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=6)).T
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)
    assert tails[[0, 4]].isnan().all()  # no other slot was written


def new_layer(key_heads, key_size, heads, value_size, width=3) -> delta.GatedDeltaNet:
    sizes = dict(num_key_heads=key_heads, key_head_dim=key_size, num_value_heads=heads)
    sizes |= dict(value_head_dim=value_size, conv_kernel_dim=width + 1)
    config = SimpleNamespace(**{f"linear_{name}": size for name, size in sizes.items()})
    config.hidden_size, config.rms_norm_eps = 8, 1e-6
    layer = delta.GatedDeltaNet(config, 0, torch_ops).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()  # decays of all sizes
    layer.norm.weight.uniform_(0.5, 1.5)
    return layer


# tokens, tokens before, slot: old and new sequences, padding, tails that are longer than a chunk
DECODES = [(1, 9, 5), (1, 0, 3), (1, 2, 1), (1, 0, 0), (1, 0, 0)]
CHUNKS = [(2, 5, 6), (18, 0, 7), (3, 40, 4)]


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sequences", [DECODES, DECODES[:3] + CHUNKS])
@pytest.mark.parametrize("sizes", [(2, 8, 4, 12), (1, 128, 1, 64), (3, 20, 3, 40)])
@backends()
def test_the_kernels_of_a_layer(backend, sizes, sequences, dtype):
    """States in several parts, several channels to a program; no other slot is written."""
    torch.manual_seed(3)
    layer = new_layer(*sizes)
    device = device_of(backend)
    counts, starts, slots = zip(*sequences)
    key_heads, key_size, heads, value_size = sizes
    shapes = [(3, layer.sizes[0]), (heads, key_size, value_size)]
    states = [torch.randn(1, 11, *shape) for shape in shapes]
    used = [slot for _, start, slot in sequences if start]
    for state in states:
        state[:, [slot for slot in range(11) if slot not in used]] = torch.nan
    qkvz = torch.randn(sum(counts), sum(layer.sizes)).to(dtype)
    ba = 4 * torch.randn(sum(counts), 2 * sizes[2]).to(dtype)
    results = []
    for ops, place in ((torch_ops, "cpu"), (ops_of(backend), device)):
        own = [state.to(place, copy=True) for state in states]
        batch = batch_of(counts, starts, slots, 3, own, place)
        out = ops.delta_rule(layer.to(place), qkvz.to(place), ba.to(place), batch)
        assert out.dtype == dtype
        results.append([out.cpu().float(), *(state[:, 1:].cpu() for state in own)])
    if backend == "triton":  # where a recorded step has several padding rows at once
        assert all(state[:, 0].isnan().all() for state in own)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-3
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-3, equal_nan=True)


def test_padding_and_new_sequences_read_zeros():
    """Slot 0 is always read as zeros: it may hold anything, NaN too."""
    rows = batch_of([1, 1, 1], [7, 0, 7], [0, 1, 2], 3).rows
    assert rows.is_new.tolist() == [True, True, False]
    qkv, log_decay, beta = inputs(3)
    states = torch.full((3, HEADS, 8, 12), torch.nan)
    states[2] = 1.0
    before = states[2].clone()
    out = delta.decode(qkv, log_decay, beta, SIZES, states, rows.slots, rows.is_new)
    new, _ = one_by_one(qkv[:1], log_decay[:1], beta[:1], torch.zeros(HEADS, 8, 12))
    old, _ = one_by_one(qkv[2:], log_decay[2:], beta[2:], before)
    torch.testing.assert_close(out[:1], new)
    torch.testing.assert_close(out[2:], old)
    assert states[:2].isfinite().all()
