"""The plain reference against dense attention for one sequence at a time, and the CPU's backend against both.

Run: pytest tests/core/test_attention.py [-k borders]
"""

import pytest
import torch
from dense_attention import dense_attention
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.layers import attention, torch_attention
from nanovllm.layers.torch_attention import Layout, group_by_context
from nanovllm.layers.torch_ops import layout, paged_attention, store_kv
from tutorials.measure.batches import BORDERS, random_batch


def check(sequences, num_heads, num_kv_heads, head_dim, **kwargs):
    batch, keys = random_batch(sequences, num_kv_heads, head_dim, **kwargs)
    layer, scale = 1, head_dim**-0.5
    lengths = [length for length, _ in sequences]
    q = torch.randn(sum(lengths), num_heads, head_dim, generator=torch.Generator().manual_seed(1))
    new = torch.cat([kv[:, layer, -length:] for kv, length in zip(keys, lengths)], dim=1)
    untouched = batch.kv_cache.tensor[:, 0].clone()
    store_kv(new[0], new[1], batch, layer)
    batch.layout = layout(batch)
    assert batch.kv_cache.tensor[:, 0].nan_to_num().equal(untouched.nan_to_num())
    expected = [dense_attention(x, *kv[:, layer], scale) for x, kv in zip(q.split(lengths), keys)]
    for out in (
        attention.paged_attention(q, batch, layer, scale),
        paged_attention(q, batch, layer, scale),
    ):
        torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (7, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [16, 32, 80])
def test_a_mixture_of_prompts_chunks_and_decodes(heads, head_dim):
    check([(1, 9), (5, 5), (3, 20), (1, 1), (1, 33), (17, 40)], *heads, head_dim)


@pytest.mark.parametrize("context", BORDERS)
def test_every_split_into_cached_and_new_at_block_borders(context):
    for length in {1, 2, context // 2, context - 1, context} & set(range(1, context + 1)):
        check([(length, context)], 4, 2, 16, seed=length)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
def test_block_sizes(block_size):
    check([(1, 10), (4, 12), (1, 3)], 4, 2, 16, block_size=block_size)


def test_decodes_only_and_prompts_only():
    check([(1, context) for context in BORDERS], 6, 2, 32)
    check([(context, context) for context in BORDERS], 6, 2, 32)


def test_a_long_context_beside_short_ones_is_a_group_of_its_own():
    sequences = [(1, 50), (1, 2000), (1, 49), *[(1, 50)] * 13]
    batch, _ = random_batch(sequences, 2, 16, num_blocks=400)
    assert sorted(part.places[:, 0].numel() for part in Layout(batch).parts) == [15 * 50, 2000]
    check([(1, 900), (1, 3), (4, 9), (1, 70), (1, 16), (1, 17)], 4, 2, 16, num_blocks=140)


def test_groups_on_a_gpu_are_large(monkeypatch):
    """There, a call costs more than a copy that is in no cache."""
    batch, _ = random_batch([(1, 130)] * 64, 8, 32, block_size=16, num_blocks=800)
    counts = {}
    for device, max_bytes in [*torch_attention.GATHERED_BYTES.items()]:
        monkeypatch.setitem(torch_attention.GATHERED_BYTES, "cpu", max_bytes)
        counts[device] = len(Layout(batch).parts)
    assert counts == {"cpu": 5, "cuda": 1}


@given(st.lists(st.integers(1, 5000), max_size=60), st.sampled_from([1000, 10**6]))
def test_groups_have_every_row_once_and_little_padding(contexts, most_keys):
    groups = group_by_context(list(range(len(contexts))), contexts, most_keys)
    assert sorted(row for group in groups for row in group) == list(range(len(contexts)))
    for group in groups:
        keys = sum(contexts[row] for row in group)
        padding = len(group) * max(contexts[row] for row in group) - keys
        assert padding <= max(512, keys // 2)
        assert keys + padding <= most_keys or len(group) == 1


def test_the_work_does_not_grow_with_the_capacity_of_the_cache():
    """No operation, nor one inside another, may allocate anything of the size of the cache."""
    batch, _ = random_batch([(1, 9), (5, 12)], 2, 16, num_blocks=5000)
    q, new = torch.randn(6, 4, 16), torch.randn(2, 6, 2, 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        batch.layout = layout(batch)
        store_kv(new[0], new[1], batch, 0)
        paged_attention(q, batch, 0, 0.25)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 16_384 < batch.kv_cache.tensor.nbytes // 1000
