"""Keys and values in 8 bits: the kernels of each backend against the plain reference, and whole engines.

Run: pytest tests/quantization/test_kv_cache.py [-k engine]
"""

from dataclasses import replace

import pytest
import torch
from backends import DEVICE, PROBLEM, device_of, move_batch, ops_of
from checkpoints import new_model, save
from thread_group import Threads

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.backends import torch_ops
from nanovllm.layers import attention
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.quantization.kv_cache import Int8Cache
from tutorials.measure.batches import random_batch

HAS_TRITON = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
TRITON = pytest.param("triton", marks=[HAS_TRITON, pytest.mark.slow(but_every=9)])
NUMBA = pytest.param("numba", marks=pytest.mark.cpu)
BACKENDS = ["torch", NUMBA, TRITON]
MIXTURE = [(1, 9), (1, 70), (1, 1), (5, 5), (3, 20), (17, 40)]
not_finite = pytest.mark.filterwarnings("ignore:overflow|invalid:RuntimeWarning")


def int8_batch(sequences, kv_heads, head_dim, **kwargs):
    """A batch, of whose slots those that no sequence owns are NaN; the same in floats; and new keys and values."""
    batch, keys = random_batch(sequences, kv_heads, head_dim, num_blocks=200, **kwargs)
    parts = [kv[:, 1, -length:] for kv, (length, _) in zip(keys, sequences)]
    quantized = replace(batch, kv_cache=Int8Cache(Int8Cache.stored(batch.kv_cache.tensor)))
    return quantized, batch, torch.cat(parts, dim=1)


# --- rows ---


def test_a_row_is_nearly_what_was_stored():
    """Half a step of its largest number; zeros, tiny and huge numbers, too. What is not finite stays so."""
    numbers = torch.randn(40, 2, 12) * torch.logspace(-20, 20, 40)[:, None, None]
    numbers[0] = 0
    numbers[1, 0, 2], numbers[2, 1, 3] = torch.nan, -torch.inf
    found = Int8Cache.restored(Int8Cache.stored(numbers))
    is_finite = found.isfinite()
    assert is_finite.all(-1).equal(is_finite.any(-1)) and (~is_finite.all(-1)).sum() == 2
    assert not is_finite[1, 0].any() and not is_finite[2, 1].any() and not found[0].any()
    error = (found - numbers).abs() / numbers.abs().amax(-1, True).clamp(min=1e-30)
    assert error[is_finite].max() < 0.5001 / 127


@not_finite
@pytest.mark.parametrize("head_dim", [4, 20, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [NUMBA, TRITON])
def test_a_kernel_stores_the_same_bits(backend, dtype, head_dim):
    """Ties, zeros and all sizes of numbers; NaN and infinities within their row. As in the model, from views."""
    kv = torch.randn(30, 6, head_dim) * torch.logspace(-8, 3, 30)[:, None, None]
    kv[0], kv[1] = 0, torch.arange(head_dim) / 2
    kv[1, :, 0] = 127
    kv[2, 0, 3], kv[3, 4, 1] = torch.nan, torch.inf
    slots, caches = torch.randperm(36)[:30], []
    cos_sin = torch.cat([torch.ones(30, head_dim // 2), torch.zeros(30, head_dim // 2)], dim=1)
    for name in ("torch", backend):
        cache = Int8Cache(torch.full((2, 2, 9, 4, 3, head_dim + 4), 77, dtype=torch.int8))
        batch = replace(random_batch([(1, 1)], 1, 4)[0], kv_cache=cache, slot_mapping=slots)
        move_batch(batch, device_of(name))
        qkv, not_rotated = kv.to(device_of(name), dtype), cos_sin.to(device_of(name))
        ops_of(name).rotate_and_store(qkv, (None, None), not_rotated, [0, 3, 3], batch, 1)
        caches.append(batch.kv_cache.tensor.cpu())
    expected, found = map(Int8Cache.restored, caches)
    assert expected.isfinite().equal(found.isfinite()) and not found.isfinite().all()
    is_row = found.isfinite().all(-1)
    assert torch.equal(caches[0][is_row], caches[1][is_row])


# --- attention ---


@not_finite
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_that_of_the_reference(backend, group, block_size):
    batch, floats, new = int8_batch(MIXTURE, 2, 20, block_size=block_size, seed=group)
    ops, device = ops_of(backend), device_of(backend)
    q = torch.randn(new.shape[1], 2 * group, 20, generator=torch.Generator().manual_seed(1))
    q, new = q.to(device), new.to(device)
    move_batch(batch, device)
    move_batch(floats, device)
    torch_ops.store_kv(new[0], new[1], batch, 1)
    batch.layout = ops.layout(batch)
    found = ops.paged_attention(q, batch, 1, 0.2)
    expected = attention.paged_attention(q, batch, 1, 0.2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch_ops.store_kv(new[0], new[1], floats, 1)
    plain = attention.paged_attention(q, floats, 1, 0.2)
    error = (found - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert 1e-4 < error.max() < 0.03, error.max()


@pytest.mark.parametrize("dtype, bound", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_values_in_16_bits(backend, dtype, bound):
    """A weight times a scale may be too small for float16. Triton's interpreter multiplies bfloat16 wrongly."""
    if backend == "triton" and dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("see choose_ops")
    batch, _, new = int8_batch([(1, 400), (20, 90)], 1, 32)
    device = device_of(backend)
    move_batch(batch, device)
    new[1] *= 1e-3
    _, values = batch.kv_cache.tensor
    values.copy_(Int8Cache.stored(Int8Cache.restored(values) * 1e-3))
    ops = ops_of(backend)
    torch_ops.store_kv(*new.to(device, dtype), batch, 1)
    batch.layout = ops.layout(batch)
    q = torch.randn(21, 2, 32, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = ops.paged_attention(q, batch, 1, 0.2).float()
    expected = attention.paged_attention(q.float(), batch, 1, 0.2)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < bound, error.max()


# --- the engine ---


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(new_model("qwen3", head_dim=32), tmp_path_factory.mktemp("qwen3"))


PROMPTS = [[3, 4, 5] * 12 + [i] * n for i, n in enumerate((1, 4, 9, 15), 6)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=1, max_tokens=12, n=2),
    BeamSearchParams(beam_width=3, max_tokens=8),
    SamplingParams(temperature=0.8, seed=3, max_tokens=14),
]
PLAIN = dict(dtype="float32", kv_cache_dtype="int8", num_blocks=90, block_size=4)
EAGER = PLAIN | {"enforce_eager": True}  # one call would be compiled: test_numba_step.py has it
SCARCE = EAGER | dict(
    num_blocks=24, max_model_len=72, max_num_seqs=7, max_num_batched_tokens=13, swap_gib=0.01
)


def tokens(llm, prompts=PROMPTS, params=PARAMS):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(path):
    """Each request in an engine of its own."""
    return [tokens(LLM(path, **EAGER), [a], [b])[0] for a, b in zip(PROMPTS, PARAMS)]


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize("backend", ["torch", NUMBA])
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_engine_gives_the_same_tokens_in_company(path, alone, mode, drafts, backend):
    """With chunks, prefixes from the cache, preemption, copied blocks, beams and drafts."""
    options = dict(attention_backend=backend, preemption_mode=mode, speculative_config=drafts)
    with LLM(path, **SCARCE, **options) as llm:
        for _ in range(2):  # the second time, the prompts' starts are in the cache
            assert tokens(llm) == alone
        stats = llm.stats()
        assert stats["preemptions"] > 0 and (drafts is None or stats["draft_tokens"] > 0)
        check_blocks(llm.block_manager, [])


@pytest.mark.slow
@not_finite
@HAS_TRITON
def test_an_engine_with_triton_and_recorded_steps(path, alone):
    """The recordings are plain calls on a CPU."""
    with LLM(path, **PLAIN, attention_backend="triton", max_num_seqs=6) as llm:
        assert llm.runner.recorder is not None and tokens(llm) == alone


@pytest.mark.cpu
@pytest.mark.slow
def test_an_engine_on_two_ranks(path, alone):
    with Threads(path, 2, **EAGER) as llm:
        assert tokens(llm) == alone


@pytest.mark.cpu  # whose cache is as large as one says
def test_a_block_has_a_quarter_of_the_bytes(path, caplog):
    plain = CacheShape(28, 16, 8, 128, torch.float32)
    assert plain.block_bytes == 2 * 28 * 16 * 8 * 512
    sizes = dict(block_size=4, max_num_seqs=256, kv_cache_gib=0.002, enforce_eager=True)
    sizes["dtype"] = "float32"
    int8, floats = (LLM(path, kv_cache_dtype=name, **sizes).runner for name in ("int8", "auto"))
    assert int8.shape[:5] == (2, 4, 2, 36, torch.int8) and floats.shape.dtype == torch.float32
    assert int8.shape.block_bytes * 128 == floats.shape.block_bytes * 36
    assert int8.num_blocks == int(0.002 * 2**30) // int8.shape.block_bytes


def test_what_is_not_possible_is_refused(tmp_path):
    allowed = "it must be 'auto' with attention_backend='vattention'"
    with pytest.raises(ValueError, match=f"kv_cache_dtype='int8' is not allowed: {allowed}"):
        LLM(kv_cache_dtype="int8", attention_backend="vattention")
    odd = save(new_model("qwen3", head_dim=18), tmp_path)
    words = "'int8' is not allowed: head_dim is 18, and must be a multiple of 4"
    with pytest.raises(ValueError, match=words):
        LLM(odd, kv_cache_dtype="int8", num_blocks=9)
