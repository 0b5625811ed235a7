"""The gated delta rule: its two forms against each other and against transformers, and the convolution.

Run: pytest tests/hybrid/test_delta.py
"""

import pytest
import torch
import torch.nn.functional as F
from backends import backends, device_of, ops_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from nanovllm.layers.batch import Batch
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


def rows_of(counts: list[int], starts: list[int], slots: list[int], width: int) -> delta.StateRows:
    ends = torch.tensor([0, *counts]).cumsum(0)
    batch = Batch(
        kv_cache=KVCache(torch.zeros(2, 1, 1, 1, 1, 1)),
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64),
        cu_seqlens_q=ends.int(),
        context_lens=torch.tensor([s + n for s, n in zip(starts, counts)], dtype=torch.int32),
        cu_blocks=torch.zeros(len(counts) + 1, dtype=torch.int32),
        state_slots=torch.tensor(slots),
        block_tables=torch.zeros(0, dtype=torch.int32),
        num_decodes=sum(count == 1 for count in counts),
    )
    return delta.StateRows(batch, width)


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
        rows = rows_of(chosen, [done[b] for b in running], [3 - b for b in running], width)
        x = torch.cat([sequences[b][done[b] : done[b] + counts[b]] for b in running])
        for b, part in zip(running, delta.convolve(x, weight, tails, rows).split(chosen)):
            results[b].append(part)
            done[b] += counts[b]
    for sequence, parts in zip(sequences, results):
        padded = F.pad(sequence.T, (width, 0))
        expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=6)).T
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=1e-5)
    assert tails[[0, 4]].isnan().all()  # no other slot was written


@backends()
@pytest.mark.parametrize(
    "heads, sizes, value_size", [(4, (2, 8), 12), (3, (3, 20), 40), (2, (1, 128), 64)]
)
def test_the_kernels_of_a_decode(backend, heads, sizes, value_size):
    """StateRows that share a key head, columns in several parts, a new sequence, padding rows; no other slot is written."""
    decode = ops_of(backend).delta_rule
    device = device_of(backend)
    generator = torch.Generator().manual_seed(3)
    channels = 2 * sizes[0] * sizes[1] + heads * value_size
    qkv = torch.randn(5, channels, generator=generator)
    log_decay = -(torch.rand(5, heads, generator=generator) ** 4) * 20
    beta = torch.rand(5, heads, generator=generator)
    states = torch.randn(7, heads, sizes[1], value_size, generator=generator)
    states[[0, 3]] = torch.nan
    slots, is_new = torch.tensor([5, 3, 1, 0, 6]), torch.tensor([0, 1, 0, 1, 0]).bool()
    expected_states = states.clone()
    expected = delta.decode(qkv, log_decay, beta, sizes, expected_states, slots, is_new)
    on_device = states.to(device)
    rest = (on_device, slots.to(device), is_new.to(device))
    out = decode(*(x.to(device) for x in (qkv, log_decay, beta)), sizes, *rest)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(on_device[1:].cpu(), expected_states[1:], atol=1e-5, rtol=1e-4)
    assert on_device[[2, 4]].cpu().equal(states[[2, 4]])
    if backend == "triton":  # where a recorded step has several padding rows at once
        assert on_device[0].isnan().all()


def test_padding_and_new_sequences_read_zeros():
    """Slot 0 is always read as zeros: it may hold anything, NaN too."""
    rows = rows_of([1, 1, 1], [7, 0, 7], [0, 1, 2], 3)
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
