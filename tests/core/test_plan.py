"""The plan of attention on a GPU: each query meets each of its keys in one program, and no mixture of contexts waits
for one program. The kernel runs in Triton's interpreter.

Run: pytest tests/core/test_plan.py [-k balanced]
"""

import random

import pytest
import torch
from backends import DEVICE, PROBLEM, move_batch

from nanovllm.config import Limits
from nanovllm.device.memory import warm_up_steps
from nanovllm.layers import triton_plan
from tutorials.measure.batches import random_batch

pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


def plan_of(sequences, share, monkeypatch, heads=16, kv_heads=8, dtype=torch.bfloat16):
    """The tile, and each program's (sequence, tile, part, parts), of decodes or of chunks. No key is needed."""
    batch, _ = random_batch([(1, 1)], 1, 16)
    lengths, contexts = (torch.tensor(part) for part in zip(*sequences))
    batch.cu_seqlens_q = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    batch.context_lens = contexts.int()
    batch.num_decodes = int((lengths == 1).all()) * len(lengths)
    move_batch(batch, DEVICE)
    batch.kv_cache.num_kv_heads = kv_heads
    batch.kv_cache.head_dim = 128
    batch.layout = {}
    monkeypatch.setattr(triton_plan, "share_of", lambda *args: share)
    q = torch.empty(int(lengths.sum()), heads, 128, dtype=dtype, device=DEVICE)
    work = triton_plan.work_of(q, batch, 0, len(lengths))
    return work, work.plan.tolist()


def share_of(kv_heads):
    return triton_plan.PROGRAMS * MULTIPROCESSORS // kv_heads


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("share", [1, 2, 7, 66, 528])
@pytest.mark.parametrize("seed", range(4))
def test_each_part_of_each_tile_has_one_program(share, seed, monkeypatch):
    """More sequences than one pass of the kernel takes; some are padding. Contexts in parts come first, then whole ones,
    then programs without work; both in the order of the sequences."""
    rng = random.Random(seed)
    contexts = [int(2 ** rng.uniform(0, 15)) for _ in range(rng.choice([1, 3, 70, 150]))]
    most = 1 if seed % 2 else 300
    sequences = [(rng.randint(1, min(most, context)), context) for context in contexts]
    if most == 1:
        sequences[3:5] = [(1, 0)] * len(sequences[3:5])
    work, plan = plan_of(sequences, share, monkeypatch)
    tiles = [-(-length // work.tile.tokens) * (context > 0) for length, context in sequences]
    total = sum(n * context for n, (_, context) in zip(tiles, sequences))
    expected: list[list[list[int]]] = [[], []]
    for seq, (n, (_, context)) in enumerate(zip(tiles, sequences)):
        parts = max(1, min(context * share // total, -(-context // work.part)))
        items = [[seq, tile, part, parts] for tile in range(n) for part in range(parts)]
        expected[parts == 1] += items
    cut, whole = expected
    without_work = len(plan) - len(cut) - len(whole)
    assert len(cut) <= share and without_work >= 0
    assert plan == cut + whole + [[0] * 4] * without_work


# --- the balance ---

# an H200, from tutorials/results/first_light_h200/sweep.json: 16 x 4096 in one part take 111.5 us, so a program alone on
# its multiprocessor reads 19 GB/s; an H100's memory gives 3 TB/s. Three programs of decodes fit on a multiprocessor.
MULTIPROCESSORS, RESIDENT = 132, 3
ONE, ALL = 19e9, 3e12  # bytes per second
TOKEN = 2 * 128 * 2  # bytes of a key and a value in one head


def keys_of(contexts: list[int], kv_heads: int, monkeypatch) -> list[int]:
    """How many keys each program reads."""
    work, plan = plan_of(
        [(1, context) for context in contexts],
        share_of(kv_heads),
        monkeypatch,
        2 * kv_heads,
        kv_heads,
    )
    keys = []
    for seq, _, part, parts in plan:
        size = max(-(-contexts[seq] // max(parts, 1)), work.part)
        size = -(-size // work.tile.keys) * work.tile.keys
        keys.append(max(0, min(size, contexts[seq] - part * size)) if parts else 0)
    return keys


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("kv_heads", [2, 8, 1, 32])
def test_any_mixture_is_balanced(kv_heads, monkeypatch):
    """A part has at most 2,048 keys, or a program reads it in less time than the memory needs for all keys."""
    rng = random.Random(kv_heads)
    for _ in range(6):
        exponent = rng.uniform(5, 15)
        num = rng.choice([1, 2, 17, 45, 64, 130])
        contexts = [int(2 ** rng.uniform(0, exponent)) for _ in range(num)]
        keys = keys_of(contexts, kv_heads, monkeypatch)
        assert sum(keys) == sum(contexts)
        least = sum(keys) * TOKEN * kv_heads / ALL  # seconds to read all keys
        assert max(keys) <= 2048 or max(keys) * TOKEN / ONE <= 0.7 * least


def test_a_short_chunk_behind_a_long_context(monkeypatch):
    """50 tokens of a chat behind 32,000, or 4 draft tokens: as many programs as the GPU has room for, where there were 8
    or 16. A prompt of 8,192 tokens has enough of them."""
    for length, context in ((50, 32_050), (5, 32_005), (17, 4096)):
        _, plan = plan_of([(length, context)], share_of(8), monkeypatch)
        num_programs = 8 * sum(item[3] > 0 for item in plan)
        assert num_programs >= MULTIPROCESSORS * (RESIDENT if context > 5000 else 1) * 0.9
    _, plan = plan_of([(8192, 8192)], share_of(8), monkeypatch)
    assert {item[3] for item in plan} == {0, 1}


@pytest.mark.slow(but_every=19)
@pytest.mark.parametrize("longest", [3, 40, 40_960])
@pytest.mark.parametrize("heads", [1, 7, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tile_is_new_while_serving(longest, heads, dtype, monkeypatch):
    """Each is a kernel: all are compiled when the engine starts."""
    limits = Limits(max_model_len=longest, max_num_seqs=512, max_num_batched_tokens=512)

    def tiles_of(lengths):
        options = dict(heads=heads, kv_heads=1, dtype=dtype)
        return {plan_of([(n, n)], 1, monkeypatch, **options)[0].tile for n in lengths}

    steps = warm_up_steps(torch.device("cpu"), limits, 16, torch.bfloat16)
    compiled = tiles_of({item.num_tokens for step in steps for item in step.items})
    assert tiles_of(range(1, min(longest, 60) + 1)) == compiled
