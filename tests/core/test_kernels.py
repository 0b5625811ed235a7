"""The Triton kernels against the PyTorch reference, in Triton's interpreter or on a GPU, and compiled without one.

Run: pytest tests/core/test_kernels.py [-k split]
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import new_model, save
from compile_kernels import ptxas_problem
from far_blocks import moved_away

from nanovllm import LLM, SamplingParams
from nanovllm.layers import attention, torch_ops, triton_attention
from nanovllm.layers.kv_cache import KVCache
from tutorials.machine import interpreter_problem
from tutorials.measure.batches import BORDERS, random_batch

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = interpreter_problem()
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and PROBLEM is not None, reason=str(PROBLEM))
MIXTURE = [(1, 9), (5, 5), (3, 20), (1, 1), (1, 33), (17, 40)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(sequences, heads, kv_heads, head_dim, dtype=torch.float32, splits=None, **kwargs):
    """Both functions on the same random batch, whose unowned slots are NaN."""
    batch, keys = random_batch(sequences, kv_heads, head_dim, **kwargs)
    lengths, layer, scale = [length for length, _ in sequences], 1, head_dim**-0.5
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            setattr(batch, name, value.to(DEVICE))
    batch.kv_cache = KVCache(batch.kv_cache.tensor.to(DEVICE, dtype))
    q = torch.randn(sum(lengths), heads, head_dim, generator=torch.Generator().manual_seed(1)).to(
        DEVICE, dtype
    )
    kv = torch.cat([kv[:, layer, -length:] for kv, length in zip(keys, lengths)], dim=1).to(
        DEVICE, dtype
    )
    expected_cache = KVCache(batch.kv_cache.tensor.clone())
    torch_ops.store_kv(*kv, replace(batch, kv_cache=expected_cache), layer)
    # as in the model, keys and values are views of something larger
    qkv = torch.cat([kv[0], kv[1]], dim=1)
    triton_attention.store_kv(*qkv.split(kv_heads, dim=1), batch, layer)
    assert torch.equal(batch.kv_cache.tensor.nan_to_num(), expected_cache.tensor.nan_to_num())
    expected = attention.paged_attention(q, batch, layer, scale)
    batch.layout = splits or triton_attention.layout(batch)
    out = triton_attention.paged_attention(q, batch, layer, scale)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dims(head_dim, dtype):
    check(MIXTURE, 4, 2, head_dim, dtype)


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7, 5, 6, 8])
def test_query_heads_per_kv_head(ratio):
    check(MIXTURE, 2 * ratio, 2, 32)
    check([(1, context) for context in BORDERS[:5]], ratio, 1, 32)


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256, 1])
def test_block_sizes(block_size):
    sequences = [*MIXTURE, (1, 300), (2, 257)]
    num_blocks = max(128, 1024 // block_size)
    check(sequences, 4, 2, 32, block_size=block_size, num_blocks=num_blocks)


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("context", BORDERS)
def test_every_split_into_cached_and_new_at_block_borders(context):
    for length in {1, 2, context // 2, context} & set(range(1, context + 1)):
        check([(length, context)], 4, 2, 32, seed=length)


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("part", [1, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_split_kv_of_decodes(splits, part, dtype, monkeypatch):
    """Parts of one tile, of several and of none; and parts that are kept long. For one KV head: the next
    test has two."""
    sequences = [(1, context) for context in (1, 15, 64, 65, 400)]
    monkeypatch.setattr(triton_attention, "PART", part)
    check(sequences, 3, 1, 32, dtype, splits, num_blocks=120)


@pytest.mark.parametrize("splits", [1, 5])
def test_decodes_before_chunks(splits, monkeypatch):
    """As the runner sorts them: two launches."""
    monkeypatch.setattr(triton_attention, "PART", 64)
    sequences = [(1, 9), (1, 150), (1, 1), (5, 5), (1, 12), (20, 70), (17, 40)]
    check(sequences, 6, 2, 32, splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_odd_shapes(splits, monkeypatch):
    """No size is a power of two, and each kind of tile, part and block ends somewhere in its middle. The last block table
    has no block to spare, and block 0, which a mask stands for, is NaN."""
    monkeypatch.setattr(triton_attention, "PART", 64)
    sequences = [(1, 145), (1, 7), (1, 200), (17, 81), (5, 5), (13, 85)]
    check(sequences, 9, 3, 20, splits=splits, block_size=5, num_blocks=160)


def test_tiles_of_a_long_prompt():
    check([(40, 40), (1, 7), (20, 90)], 7, 1, 64)


def test_padding_rows_do_nothing():
    """A CUDA graph of 4 rows replayed for 2 sequences: no slot, no context, no output."""
    batch, _ = random_batch([(1, 9), (1, 20)], 2, 32)
    batch.kv_cache = KVCache(batch.kv_cache.tensor.nan_to_num(0.5).to(DEVICE))
    batch.slot_mapping = torch.tensor([*batch.slot_mapping, -1, -1], device=DEVICE)
    batch.cu_seqlens_q = torch.arange(5, dtype=torch.int32, device=DEVICE)
    batch.context_lens = torch.tensor([9, 20, 0, 0], dtype=torch.int32, device=DEVICE)
    batch.cu_blocks = torch.nn.functional.pad(
        batch.cu_blocks, (0, 2), value=batch.cu_blocks[-1].item()
    ).to(DEVICE)
    batch.block_tables, batch.num_decodes = batch.block_tables.to(DEVICE), 4
    before, kv = batch.kv_cache.tensor.clone(), torch.ones(4, 2, 32, device=DEVICE)
    triton_attention.store_kv(kv, kv, batch, 0)
    changed = (batch.kv_cache.tensor != before).any(-1).any(-1).sum().item()
    assert changed == 4  # the keys and the values of two tokens
    q = torch.randn(4, 4, 32, device=DEVICE)
    full = []
    for batch.layout in (1, 4):
        full.append(triton_attention.paged_attention(q, batch, 0, 0.2))
    batch.cu_seqlens_q, batch.context_lens = batch.cu_seqlens_q[:3], batch.context_lens[:2]
    batch.cu_blocks, batch.num_decodes = batch.cu_blocks[:3], 2
    for out in full:
        torch.testing.assert_close(
            out[:2], attention.paged_attention(q[:2], batch, 0, 0.2), atol=1e-5, rtol=1e-5
        )


def test_places_that_take_more_than_32_bits(monkeypatch):
    """Blocks at the end of a large cache give what the same ones give at the beginning."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < 2**34:  # on a CPU, only addresses
        pytest.skip("needs 16 GiB of GPU memory")
    monkeypatch.setattr(triton_attention, "PART", 16)
    near, _ = random_batch([(1, 40), (1, 7), (9, 30)], 1, 64, block_size=16, num_layers=1)
    near.kv_cache = KVCache(near.kv_cache.tensor.to(DEVICE, torch.float16))
    for name in ("slot_mapping", "cu_seqlens_q", "context_lens", "cu_blocks", "block_tables"):
        setattr(near, name, getattr(near, name).to(DEVICE))
    far, first = moved_away(near)
    caches = [batch.kv_cache.tensor[:, :, start:] for batch, start in ((near, 0), (far, first))]
    assert first * caches[0][0, 0, 0].numel() > 2**31
    kv = torch.randn(2, 11, 1, 64, device=DEVICE, dtype=torch.float16)
    for batch in (near, far):
        triton_attention.store_kv(*kv, batch, 0)
    assert torch.equal(*(cache.nan_to_num(99) for cache in caches))
    q = torch.randn(11, 2, 64, device=DEVICE, dtype=torch.float16)
    for near.layout in (1, 2):
        far.layout = near.layout
        outs = [triton_attention.paged_attention(q, batch, 0, 0.1) for batch in (near, far)]
        assert torch.equal(*outs) and not outs[0].isnan().any()
    for batch, start in ((near, 0), (far, first)):
        triton_attention.copy_blocks(batch.kv_cache, [(start + 3, start + 5), (start + 2, 0)])
    assert torch.equal(*(cache[:, :, 1:].nan_to_num(99) for cache in caches))
    assert torch.equal(*(batch.kv_cache.tensor[:, :, 0].nan_to_num(99) for batch in (near, far)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "block_size, kv_heads, head_dim", [(1, 1, 32), (3, 2, 20), (16, 2, 32), (256, 1, 32)]
)
def test_copy_blocks(block_size, kv_heads, head_dim, dtype):
    """One source for two targets, others apart; both ways against a loop, and nothing else changes."""
    cache = torch.randn(2, 3, 9, block_size, kv_heads, head_dim).to(DEVICE, dtype)
    copies, expected = [(4, 7), (4, 0), (8, 2), (1, 3)], cache.clone()
    for source, target in copies:
        expected[:, :, target] = cache[:, :, source]
    for backend in (torch_ops, triton_attention):
        copied = KVCache(cache.clone())
        backend.copy_blocks(copied, copies)
        assert torch.equal(copied.tensor, expected)


# padding rows attend to nothing: any numbers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")
def test_the_engine_gives_the_same_tokens(tmp_path):
    model = new_model("qwen3", head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    path = save(model, tmp_path)
    prompts, params = (
        [[i] * (5 * i + 1) for i in range(1, 4)],
        SamplingParams(temperature=0, max_tokens=4),
    )
    options = dict(dtype="float32", block_size=8, num_blocks=14, max_num_batched_tokens=24)
    params = [params] * 2 + [SamplingParams(n=2, seed=1, max_tokens=4)]  # which copies blocks
    outputs = [
        LLM(path, attention_backend=backend, **options).generate(prompts, params, use_tqdm=False)
        for backend in ("torch", "triton")
    ]
    torch_tokens, triton_tokens = (
        [[o.token_ids for o in r.outputs] for r in results] for results in outputs
    )
    assert torch_tokens == triton_tokens


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
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
    attention = {"decode", "prefill", "combine", "store_kv", "copy_blocks"}
    attention |= {"decode_int8", "prefill_int8", "store_int8"}
    others = {"add_and_norm", "norm_and_rotate", "silu_and_mul", "cutoff", "sample"}
    products = {"product_4_bits", "product_8_bits"}
    assert kernels.keys() == attention | others | products
    for name, found in kernels.items():
        assert found["shared"] <= 99 * 1024 and found["spilled"] == 0, name
    if capability < 80:
        return
    assert min(kernels[name]["buffers"] for name in ("decode", "prefill")) >= 2
    # then two programs of 8 warps share a multiprocessor, which has 65,536 registers
    assert max(kernels[name]["registers"] for name in ("cutoff", "sample")) <= 96
