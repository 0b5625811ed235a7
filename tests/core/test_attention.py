"""Groups of sequences that attention in PyTorch computes together, and its memory. For its results, see test_ops.py.

Run: pytest tests/core/test_attention.py [-k padding]
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.backends.torch_ops import layout, paged_attention, store_kv
from nanovllm.layers.torch_attention import Layout, group_by_context
from tutorials.measure.batches import random_batch


def test_a_long_context_beside_short_ones_is_a_group_of_its_own():
    sequences = [(1, 50), (1, 2000), (1, 49), *[(1, 50)] * 13]
    batch, _ = random_batch(sequences, 2, 16, num_blocks=400)
    assert sorted(part.places[:, 0].numel() for part in Layout(batch).parts) == [15 * 50, 2000]


@given(st.lists(st.integers(1, 5000), max_size=60), st.sampled_from([1000, 10**6]))
def test_groups_have_every_row_once_and_little_padding(contexts, most_keys):
    groups = group_by_context(list(range(len(contexts))), contexts, most_keys)
    assert sorted(row for group in groups for row in group) == list(range(len(contexts)))
    for group in groups:
        keys = sum(contexts[row] for row in group)
        padding = len(group) * max(contexts[row] for row in group) - keys
        assert padding <= max(512, keys // 2)
        assert keys + padding <= most_keys or len(group) == 1


@pytest.mark.slow
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
