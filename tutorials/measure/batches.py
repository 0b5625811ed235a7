"""Random batches for attention, whose keys and values are in a cache.

Tests use them, and so does the program for the first minutes on a GPU, where there may be no pytest.
"""

import random

import torch

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache

BORDERS = [1, 7, 8, 9, 16, 17, 40]  # contexts around the ends of blocks of 8 tokens


def random_batch(
    sequences, num_kv_heads, head_dim, block_size=8, num_blocks=64, num_layers=2, seed=0
):
    """`sequences` is [(query length, context length)].

    Returns the batch, and the keys and values of each sequence. Blocks are given out in random
    order. Whatever no sequence owns is NaN, so that reading it shows.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = torch.full((2, num_layers, num_blocks, block_size, num_kv_heads, head_dim), torch.nan)
    free = rng.sample(range(num_blocks), num_blocks)
    tables, slots, keys = [], [], []
    for length, context in sequences:
        table = [free.pop() for _ in range(-(-context // block_size))]
        kv = torch.randn(2, num_layers, context, num_kv_heads, head_dim, generator=generator)
        all_slots = [table[i // block_size] * block_size + i % block_size for i in range(context)]
        cached = all_slots[: context - length]
        cache.flatten(2, 3)[:, :, cached] = kv[:, :, : len(cached)]
        slots += all_slots[len(cached) :]
        to_come = rng.sample(range(num_blocks), rng.randrange(3))  # blocks for tokens to come
        tables.append(table + to_come)
        keys.append(kv)
    starts = torch.tensor([0, *(length for length, _ in sequences)]).cumsum(0)
    batch = Batch(
        kv_cache=KVCache(cache),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=starts.to(torch.int32),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        cu_blocks=torch.tensor([0, *map(len, tables)]).cumsum(0).to(torch.int32),
        block_tables=torch.tensor(
            [block_id for table in tables for block_id in table], dtype=torch.int32
        ),
        num_decodes=next(
            (b for b, (length, _) in enumerate(sequences) if length > 1), len(sequences)
        ),
    )
    return batch, keys
