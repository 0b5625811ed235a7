"""The Triton kernels, in Triton's interpreter or on a GPU: split contexts, padding rows of a CUDA graph, addresses beyond
32 bits, a cutoff without sorting; and the compiled kernels, without a GPU. For all other results, see test_ops.py.

Run: pytest tests/core/test_kernels.py [-k split]
"""

import json
import math
import mmap
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from backends import DEVICE, PROBLEM, TOLERANCE, check_attention, move_batch
from compile_kernels import ptxas_problem

from nanovllm.backends import triton_ops
from nanovllm.layers import (
    attention,
    sampler,
    torch_sampler,
    triton_attention,
    triton_plan,
    triton_sampler,
)
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.sampler import Sampling
from tutorials.measure.batches import random_batch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

# --- attention ---


MIXTURES = [
    [(1, context) for context in (1, 15, 64, 65, 400)],
    [(1, 145), (1, 7), (1, 200), (17, 81), (5, 5), (13, 85)],
    [(4, 200), (5, 70), (2, 9), (4, 4)],  # drafts: a few tokens each
    [(1, 2), (50, 300), (3, 40)],
]


DTYPES, HEADS = [torch.float32, torch.float16], [(3, 1, 32), (9, 3, 20)]
PARTS = [*product([40, 3, 8, 1], [1, 16, 100], DTYPES, MIXTURES, HEADS)][1::7]  # has each pair


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("share, part, dtype, sequences, heads", PARTS)
def test_contexts_in_parts(share, part, dtype, sequences, heads, monkeypatch):
    """Of decodes, drafts and chunks: parts of one tile, of several and of none; parts that are kept long; parts in which
    a token sees no key; more parts than are combined at a time."""
    monkeypatch.setattr(triton_attention, "SPLITS", 4)
    monkeypatch.setattr(triton_plan, "PART", part)
    monkeypatch.setattr(triton_plan, "share_of", lambda *args: share)
    check_attention("triton", sequences, *heads, dtype, block_size=5, num_blocks=160)


def test_padding_rows_do_nothing(monkeypatch):
    """A CUDA graph of 4 rows replayed for 2 sequences: no context, no output."""
    batch, _ = random_batch([(1, 9), (1, 20)], 2, 32)
    move_batch(batch, DEVICE)
    batch.kv_cache.tensor.nan_to_num_(0.5)
    batch.cu_seqlens_q = torch.arange(5, dtype=torch.int32, device=DEVICE)
    batch.context_lens = torch.tensor([9, 20, 0, 0], dtype=torch.int32, device=DEVICE)
    batch.cu_blocks = torch.cat([batch.cu_blocks, batch.cu_blocks[-1:].expand(2)])
    batch.num_decodes = 4
    q = torch.randn(4, 4, 32, device=DEVICE)
    full = []
    for share in (1, 4):
        monkeypatch.setattr(triton_plan, "share_of", lambda *args, share=share: share)
        batch.layout = {}
        full.append(triton_attention.paged_attention(q, batch, 0, 0.2))
    batch.cu_seqlens_q, batch.context_lens = batch.cu_seqlens_q[:3], batch.context_lens[:2]
    batch.cu_blocks, batch.num_decodes = batch.cu_blocks[:3], 2
    for out in full:
        torch.testing.assert_close(
            out[:2], attention.paged_attention(q[:2], batch, 0, 0.2), atol=1e-5, rtol=1e-5
        )


MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.11 on


def moved_away(batch: Batch) -> tuple[Batch, int]:
    """The same batch in a cache with so many blocks before its own that 32 bits cannot count their
    numbers, and the first of its own.

    Before the cache is memory, too: where a kernel reads whose addresses wrap around.
    """
    near = batch.kv_cache.tensor
    first = 2**31 // near[0, 0, 0].numel() + 1
    num_blocks = first + near.shape[2]
    shape = (2, near.shape[1], num_blocks, *near.shape[3:])
    numbers = untouched(2**31 + math.prod(shape), near)
    far = numbers[2**31 :].view(shape)
    far[:, :, first:] = near
    moved = replace(
        batch,
        kv_cache=KVCache(far),
        slot_mapping=batch.slot_mapping + first * near.shape[3],
        block_tables=batch.block_tables + first,
    )
    return moved, first


def untouched(size: int, like: torch.Tensor) -> torch.Tensor:
    """On a CPU only addresses: what is never written takes no memory, and is 0."""
    if like.is_cuda:
        return like.new_empty(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, size * like.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=like.dtype)


@pytest.mark.slow
def test_places_that_take_more_than_32_bits(monkeypatch):
    """Blocks at the end of a large cache give what the same ones give at the beginning."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 2**34:  # on a CPU, only addresses
        pytest.skip("needs 16 GiB of GPU memory")
    monkeypatch.setattr(triton_plan, "PART", 16)
    near, _ = random_batch([(1, 40), (1, 7), (9, 30)], 1, 64, block_size=16, num_layers=1)
    move_batch(near, DEVICE, torch.float16)
    far, first = moved_away(near)
    caches = [batch.kv_cache.tensor[:, :, start:] for batch, start in ((near, 0), (far, first))]
    assert first * caches[0][0, 0, 0].numel() > 2**31
    qkv = torch.randn(11, 4, 64, device=DEVICE, dtype=torch.float16)
    rotation = ((None, None), torch.randn(11, 64, device=DEVICE), [2, 1, 1])
    q, _ = (triton_ops.rotate_and_store(qkv.clone(), *rotation, batch, 0) for batch in (near, far))
    assert torch.equal(*(cache.nan_to_num(99) for cache in caches))
    for share in (1, 4):
        monkeypatch.setattr(triton_plan, "share_of", lambda *args, share=share: share)
        near.layout, far.layout = {}, {}
        outs = [triton_attention.paged_attention(q, batch, 0, 0.1) for batch in (near, far)]
        assert torch.equal(*outs) and not outs[0].isnan().any()
    for batch, start in ((near, 0), (far, first)):
        copies = torch.tensor([(start + 3, start + 5), (start + 2, 0)], device=DEVICE)
        triton_attention.copy_blocks(batch.kv_cache, copies)
    assert torch.equal(*(cache[:, :, 1:].nan_to_num(99) for cache in caches))
    assert torch.equal(*(batch.kv_cache.tensor[:, :, 0].nan_to_num(99) for batch in (near, far)))


# --- the cutoff of the sampler ---

FILTERS = {
    "top_p": [0.1, 0.5, 0.9, 0.999, 1.0, 1e-9],
    "min_p": [0.0, 0.0, 0.05, 0.5, 1.0],
    "top_k": [1, 3, 10**9, 10**9],
}


@pytest.mark.slow(but_every=15)
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "names", ["top_p", "min_p", "top_p min_p", "top_p top_k", "top_p min_p top_k"]
)
def test_a_cutoff_without_sorting_keeps_the_same_tokens(names, dtype, monkeypatch):
    """Ties, tokens without a weight, steep rows and flat ones, beside greedy rows. Only a small top_k asks PyTorch."""
    plain = torch_sampler.cutoff
    rng = random.Random(names)

    def short(logits, options):
        assert options.all_top_k_small, "it would sort, and wait"
        return plain(logits, options)

    rows = 4
    for vocab_size in 7, 300, 5000:
        generator = torch.Generator().manual_seed(rows + vocab_size)
        logits = torch.randn(rows, vocab_size, generator=generator)
        logits = (logits * rng.choice([0.1, 1, 5, 30])).to(DEVICE, dtype)
        if rng.random() < 0.4:
            logits = logits.round()
        logits[0, : vocab_size // 2] = -torch.inf
        temperature = torch.tensor([0.0, *rng.choices([0.3, 1.0, 5.0], k=rows - 1)])
        numbers = torch.arange(rows)
        parts = {name: torch.tensor(rng.choices(FILTERS[name], k=rows)) for name in names.split()}
        options = Sampling(temperature, numbers, numbers, **parts)
        is_drawn = temperature > 0
        if options.top_k is not None:
            options.top_k = options.top_k.clamp(max=vocab_size)
            is_limited = is_drawn & (options.top_k < vocab_size)
            options.max_top_k = max(options.top_k[is_limited].tolist(), default=0)
            options.all_top_k_small = bool(is_limited.equal(is_drawn))
        for name, part in vars(options).items():
            if isinstance(part, torch.Tensor):
                setattr(options, name, part.to(DEVICE))
        monkeypatch.setattr(torch_sampler, "cutoff", short)
        found = triton_sampler.cutoff(logits, options).view(-1, 1)
        monkeypatch.setattr(torch_sampler, "cutoff", plain)
        expected, _ = torch_sampler.cutoff(logits, options)
        has_weight = sampler.softmax_weights(logits, options) > 0
        kept = [((logits.float() >= lowest) & has_weight)[is_drawn] for lowest in (found, expected)]
        assert torch.equal(*kept)


def test_filters_at_their_border():
    """A weight that equals min_p stays, and so does the token with which the sum reaches top_p, but none behind it."""
    rows = torch.arange(3, device=DEVICE)
    temperature = torch.full((3,), 1.4426950408889634)  # weights are 1, 0.5, 0.5, 2**-30
    top_p, min_p = torch.tensor([0.5, 1.0, 0.6]), torch.tensor([0.0, 0.5, 0.5])
    options = Sampling(temperature.to(DEVICE), rows, rows, None, top_p.to(DEVICE), min_p.to(DEVICE))
    logits = torch.tensor([[0.0, -1, -1, -30]] * 3, device=DEVICE)
    assert triton_sampler.cutoff(logits, options).tolist() == [0.0, -1.0, -1.0]


# --- the compiler ---


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 90, 100, 120])
def test_compiled_ahead_of_time(capability):
    """For the heads of Qwen3-0.6B: fits into consumer cards, spills no registers, and a tile of keys and values is loaded
    while the one before is computed. Attention also fits for the largest heads, in groups of seven."""
    problem = ptxas_problem(capability)
    if problem is not None:
        pytest.skip(problem)
    folders = [str(ROOT), str(ROOT / "tests" / "tools")]
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(folders)}
    code = f"""
import compile_kernels, json, torch
odd = compile_kernels.problems({capability}, [256], [7], [torch.float16, torch.float32])
print(json.dumps([compile_kernels.all_resources({capability}), odd]))
"""
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels, odd = json.loads(done.stdout)
    assert odd == []
    assert len(kernels) == 26  # some of them in several forms
    spilled = 16 if capability == 100 else 0  # bytes: Triton 3.6, prefill_int8
    for name, found in kernels.items():
        assert found["shared"] <= 99 * 1024 and found["spilled"] <= spilled, name
    if capability == 75:
        return
    assert min(kernels[name]["buffers"] for name in ("decode", "prefill")) >= 2
    # then two programs of 8 warps share a multiprocessor, which has 65,536 registers
    assert max(kernels[name]["registers"] for name in ("cutoff", "weigh", "sample")) <= 128
