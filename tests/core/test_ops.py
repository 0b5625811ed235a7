"""Each function of a backend against its definition in plain PyTorch: Triton's in its interpreter, or on a GPU.

Run: pytest tests/core/test_ops.py [-k "norm and numba"]
"""

import inspect
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from backends import DEVICE, TOLERANCE, backends, check_attention, ops_of
from checkpoints import new_model, save

from nanovllm import LLM, BeamSearchParams, SamplingParams, model_runner
from nanovllm.backends import torch_ops
from nanovllm.layers import sampler
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import Sampling, uniform
from nanovllm.topics.quantization.kv_cache import Int8Cache
from tutorials.measure.batches import BORDERS, random_batch

DTYPES = [*TOLERANCE]

# --- attention ---

# two decodes come first; a sequence behind the chunks has one query, too
MIXTURE = [(1, 9), (1, 33), (5, 5), (3, 20), (1, 1), (17, 40)]
HEADS = [(4, 2), (8, 2), (7, 1), (2, 2), (14, 2)]
SHAPES = [*product([32, 16, 80], HEADS), *product([64, 96, 128, 256], [(4, 2)])]
SHAPES += [(32, (2 * ratio, 2)) for ratio in (3, 5, 6, 8)]
FEW_SHAPES = [(128, (2, 2)), *product([32, 16, 80], [(4, 2), (7, 1), (2, 2)])]
FEW_SHAPES += product([64, 96, 128, 256], [(4, 2)])


@pytest.mark.parametrize("head_dim, heads", SHAPES)
@backends("reference", numba=23, triton=18)
def test_a_mixture_of_decodes_prompts_and_chunks(backend, head_dim, heads):
    check_attention(backend, MIXTURE, *heads, head_dim)


@pytest.mark.parametrize("head_dim, heads", FEW_SHAPES)
@backends("reference", numba=14, triton=14)
def test_a_mixture_in_float16(backend, head_dim, heads):
    check_attention(backend, MIXTURE, *heads, head_dim, torch.float16)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_sums_are_in_fp32(backend):
    """Of decodes. A result of 16 bits is rounded once."""
    ops = ops_of(backend)
    batch, _ = random_batch([(1, 300), (1, 70)], 2, 32)
    q = randn(2, 4, 32, device="cpu", dtype=torch.float16)
    batch.kv_cache = KVCache(batch.kv_cache.tensor.nan_to_num().half())
    batch.layout = ops.layout(batch)
    found = ops.paged_attention(q, batch, 1, 0.2)
    batch.kv_cache = KVCache(batch.kv_cache.tensor.float())
    batch.layout = ops.layout(batch)
    exact = ops.paged_attention(q.float(), batch, 1, 0.2)
    torch.testing.assert_close(found.float(), exact, rtol=2**-11, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, heads", FEW_SHAPES)
@pytest.mark.parametrize("backend", ["reference", "torch", "numba"])
def test_a_mixture_in_bfloat16(backend, head_dim, heads):
    """Without Triton, whose interpreter multiplies bfloat16 wrongly."""
    check_attention(backend, MIXTURE, *heads, head_dim, torch.bfloat16)


@pytest.mark.parametrize("heads", [(6, 2), *((ratio, 1) for ratio in (8, 7, 6, 5, 4, 3, 2, 1))])
@backends("reference", numba=9, triton=0)
def test_decodes_only_and_prompts_only(backend, heads):
    check_attention(backend, [(1, context) for context in BORDERS], *heads, 32)
    check_attention(backend, [(context, context) for context in BORDERS], *heads, 32)


@pytest.mark.parametrize("context", BORDERS)
@backends("reference", triton=4)
def test_every_split_into_cached_and_new_at_block_borders(backend, context):
    for length in {1, 2, context // 2, context - 1, context} & set(range(1, context + 1)):
        check_attention(backend, [(length, context)], 4, 2, 32, seed=length)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256, 1, 3])
@backends("reference", triton=8)
def test_block_sizes(backend, block_size):
    sequences = [(1, 10), (1, 3), (1, 300), (4, 12), (5, 5), (1, 70), (17, 40), (2, 257)]
    num_blocks = max(128, 1024 // block_size)
    check_attention(backend, sequences, 4, 2, 32, block_size=block_size, num_blocks=num_blocks)


@backends("reference", triton=0)
def test_scores_of_any_size(backend):
    check_attention(backend, [(1, 40), (1, 17), *[(1, 2)] * 9], 4, 2, 32, size=1000.0)


@backends("reference", triton=0)
def test_a_long_context_beside_short_ones(backend):
    sequences = [(1, 900), (1, 3), (4, 9), (1, 70), (1, 16), (1, 17)]
    check_attention(backend, sequences, 4, 2, 32, num_blocks=140)


@backends("reference", numba=0)
def test_odd_shapes(backend):
    """No size is a power of two, and each kind of tile, part and block ends somewhere in its middle. The last block table
    has no block to spare, and block 0, which a mask stands for, is NaN."""
    sequences = [(1, 145), (1, 7), (1, 200), (17, 81), (5, 5), (13, 85)]
    check_attention(backend, sequences, 9, 3, 20, block_size=5, num_blocks=160)


@backends("reference", numba=0, triton=0)
def test_tiles_of_a_long_prompt(backend):
    check_attention(backend, [(40, 40), (1, 7), (20, 90)], 7, 1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "block_size, kv_heads, head_dim", [(1, 1, 32), (3, 2, 20), (16, 2, 32), (256, 1, 32)]
)
@backends()
def test_copy_blocks(backend, block_size, kv_heads, head_dim, dtype):
    """One source for two targets, others apart; against a loop, and nothing else changes."""
    cache = randn(2, 3, 9, block_size, kv_heads, head_dim, device=device_of(backend), dtype=dtype)
    copies, expected = [(4, 7), (4, 0), (8, 2), (1, 3)], cache.clone()
    for source, target in copies:
        expected[:, :, target] = cache[:, :, source]
    copied = KVCache(cache)
    ops_of(backend).copy_blocks(copied, torch.tensor(copies, device=cache.device))
    assert torch.equal(copied.tensor, expected)


# --- small layers ---


def device_of(backend: str) -> str:
    return "cpu" if backend == "numba" else DEVICE


def randn(*shape, device=DEVICE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def norm(size, dtype, device, seed=0):
    layer = torch.nn.RMSNorm(size, 1e-6).to(device, dtype).requires_grad_(False)
    layer.weight.data.copy_(1 + 0.2 * randn(seed + 1, size, device=device)[seed])
    return layer


def assert_close(actual, expected):
    """Within the tolerance of the actual numbers' dtype. Those expected are fp32."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


def normed(x, layer):
    """The definition of RMSNorm."""
    x = x.float()
    return x * (x.square().mean(-1, True) + layer.eps).rsqrt() * layer.weight.float()


@pytest.mark.parametrize("size", [48, 1, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@backends(numba=8)
def test_add_and_norm(backend, dtype, size):
    ops, device = ops_of(backend), device_of(backend)
    layer = norm(size, dtype, device)
    update = randn(5, size, device=device, dtype=dtype)
    x = 3 * randn(6, size, device=device, dtype=dtype)[1:]
    in_place = x.clone()
    total, found = ops.add_and_norm(in_place, update, layer)
    assert total is in_place
    if backend == "triton":  # its interpreter cuts bfloat16 off where a GPU rounds
        assert_close(total, (x + update).float())
    else:
        assert torch.equal(total, x + update)
    assert_close(found, normed(total, layer))
    _, alone = ops.add_and_norm(x[3:4].clone(), update[3:4], layer)
    assert torch.equal(found[3:4], alone)  # to the last bit, whatever is beside it


def rotated_and_stored(ops, qkv, norms, cos_sin, sizes):
    """q, k and v [T, heads, head_dim], of which k and v were stored in the slots 0, 1, 2, ..."""
    batch, _ = random_batch([(1, 1)], 1, 8)
    shape = (2, 1, 1, len(qkv), sizes[1], qkv.shape[-1])
    batch.kv_cache = KVCache(torch.empty(shape, dtype=qkv.dtype, device=qkv.device))
    batch.slot_mapping = torch.arange(len(qkv), device=qkv.device)
    q = ops.rotate_and_store(qkv.clone(), norms, cos_sin, sizes, batch, 0)
    return q, *batch.kv_cache.tensor[:, 0, 0]


@pytest.mark.parametrize("head_dim", [80, 32, 128])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@backends(numba=9, triton=5)
def test_heads_are_normalized_and_rotated(backend, dtype, has_norm, head_dim):
    ops, device, sizes = ops_of(backend), device_of(backend), [6, 2, 2]
    norms = [norm(head_dim, dtype, device, seed) if has_norm else None for seed in (1, 2)]
    angles = randn(5, head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    cos_sin = torch.cat([cos, sin], dim=1)
    qkv = randn(5, 10, head_dim, device=device, dtype=dtype)
    *rotated, v = rotated_and_stored(ops, qkv, norms, cos_sin, sizes)
    assert torch.equal(v, qkv[:, 8:])  # values are left alone
    alone = rotated_and_stored(ops, qkv[3:4], norms, cos_sin[3:4], sizes)
    for part, before, layer, one in zip(rotated, qkv.split(sizes, dim=1), norms, alone):
        before = before.float() if layer is None else normed(before, layer)
        turned = torch.view_as_complex(torch.stack(before.chunk(2, dim=-1), dim=-1))
        turned = turned * torch.complex(cos, sin).unsqueeze(1)
        assert_close(part, torch.cat([turned.real, turned.imag], dim=-1))
        assert torch.equal(part[3:4], one)


@pytest.mark.parametrize("head_dim", [80, 32, 128])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@backends(numba=9, triton=5)
def test_rotate_and_store(backend, dtype, has_norm, head_dim):
    """What PyTorch's store_kv stores of rotated heads, to the last bit: in any slots, and in a cache in 8 bits."""
    ops, device, sizes = ops_of(backend), device_of(backend), [6, 2, 2]
    norms = tuple(norm(head_dim, dtype, device, seed) if has_norm else None for seed in (1, 2))
    cos_sin = randn(5, head_dim, device=device)
    qkv = randn(5, 10, head_dim, device=device, dtype=dtype)
    q, *kv = rotated_and_stored(ops, qkv, norms, cos_sin, sizes)
    batch, _ = random_batch([(5, 5)], 2, head_dim)
    num_stored = 4 if backend == "triton" else 5  # a padding row of a recorded step has no slot
    slots = torch.tensor([11, 2, 0, 7, 5], device=device)
    padded = slots.where(torch.arange(5, device=device) < num_stored, -1)
    empty = torch.full((2, 2, 4, 3, 2, head_dim), 77.0)
    int8 = torch.full((2, 2, 4, 3, 2, head_dim + 4), 77, dtype=torch.int8)
    for kind, tensor in ((KVCache, empty.to(device, dtype)), (Int8Cache, int8.to(device))):
        batch.kv_cache, batch.slot_mapping = kind(tensor.clone()), slots[:num_stored]
        torch_ops.store_kv(*(part[:num_stored] for part in kv), batch, 1)
        expected = batch.kv_cache.tensor
        batch.kv_cache, batch.slot_mapping = kind(tensor), padded
        found = ops.rotate_and_store(qkv.clone(), norms, cos_sin, sizes, batch, 1)
        assert torch.equal(found, q) and torch.equal(tensor, expected)


@pytest.mark.parametrize("size", [1030, 1, 72])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, where exp is infinite
@backends(numba=6)
def test_silu_and_mul(backend, dtype, size):
    ops, device = ops_of(backend), device_of(backend)
    x = 8 * randn(5, 2 * size, device=device, dtype=dtype)
    extreme = torch.tensor([[-6e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]]).to(device, dtype)
    for numbers in (x, extreme):
        gate, up = numbers.float().chunk(2, dim=1)
        assert_close(ops.silu_and_mul(numbers), gate * gate.sigmoid() * up)
    assert torch.equal(ops.silu_and_mul(x)[3:4], ops.silu_and_mul(x[3:4]))


# --- sampling ---

ROUNDING = 2e-6  # of a share: fp32 sums of these rows are off by 2e-7


def is_drawn(tokens, logits, options):
    """For each row, whether its number selects this token: in float64, and with room for sums in fp32.

    Two tokens are right only where the number lies as close to the border between them as fp32 rounds.
    """
    below = logits.double() - logits.double().amax(-1, True)
    weights = (below / options.temperature.double().clamp(min=1e-30).unsqueeze(1)).exp()
    shares = weights / weights.sum(-1, True)
    at = tokens.unsqueeze(1)
    end = shares.cumsum(-1).gather(1, at).squeeze(1)
    share = shares.gather(1, at).squeeze(1)
    number = uniform(options.seed, options.position)
    is_near = (number > end - share - ROUNDING) & (number < end + ROUNDING)
    return is_near & (share > 0)


@pytest.mark.parametrize("vocab_size", [7, 1000, 9000])
@backends()
def test_sample(backend, vocab_size):
    """The token that each row's number selects, greedy rows among them; whole tiles, parts of one, several."""
    rows, device = 40, device_of(backend)
    options = Sampling(
        temperature=torch.tensor([0.0, 1.0, 0.6, 1e-3, 5.0] * 8).to(device),
        seed=torch.tensor([2**63 - 1 - 3**i for i in range(rows)]).abs().to(device),
        position=torch.arange(rows).to(device) * 1000,
    )
    logits = 4 * randn(rows, vocab_size, device=device)
    logits[7, : vocab_size // 2] = -100.0  # half of the vocabulary has weights of about 0
    logits[5, [0, vocab_size - 1]] = 99.0  # the first of equal logits, also of two tiles
    tokens = ops_of(backend).sample(logits, options)
    assert torch.equal(tokens[::5], logits[::5].argmax(-1))
    assert is_drawn(tokens, logits, options).all() and len(set(tokens.tolist())) > 3
    neighbors = is_drawn((tokens + 1) % vocab_size, logits, options)
    assert neighbors.sum() < 0.1 * rows, "the check lets other tokens pass"


@pytest.mark.filterwarnings("ignore:overflow|invalid|All-NaN:RuntimeWarning")
@backends()
def test_sample_where_all_sums_are_exact(backend):
    """Weights of 1, 0.5 and 0.25: the tokens of the reference, from several tiles; the first two or the last two tiles of
    some rows are empty. And a token for rows that are not finite, which the engine does not use."""
    device, rows = device_of(backend), torch.arange(12, device=device_of(backend))
    temperature = torch.full_like(rows, 1.4426950408889634, dtype=torch.float32)
    temperature[3::4] = 0.0
    logits = randn(12, 17000, device=device).clamp(-2, 0).round()
    logits[:6, :8192] = logits[4:8, 8192:] = -torch.inf
    logits[0, 8300:] = -torch.inf
    options = Sampling(temperature, seed=rows * 3**30, position=rows)
    tokens = ops_of(backend).sample(logits, options)
    assert torch.equal(tokens, sampler.sample(logits, options)) and len(tokens.unique()) > 8
    logits[:4, 9000], logits[4:8], logits[8:] = torch.nan, torch.nan, -torch.inf
    assert (ops_of(backend).sample(logits, options) < 17000).all()
    logits[:, 9000] = torch.inf
    found = ops_of(backend).sample(logits, options)
    assert backend != "triton" or (found == 9000).all()


@backends()
def test_sample_with_a_number_at_a_border(backend):
    """Eight equal tokens in three tiles. These positions have the numbers 0/8 to 7/8: the sum must pass them, not reach."""
    device, places = device_of(backend), [3, 100, 4095, 4096, 5000, 8191, 8192, 9001]
    positions = [1238569, 1719163, 2423325, 4987235, 4970968, 3962215, 1478854, 10220519]
    logits = torch.full((8, 9002), -torch.inf, device=device)
    logits[:, places] = 0.0
    ones = torch.ones(8, dtype=torch.int64, device=device)
    options = Sampling(ones.float(), ones, torch.tensor(positions, device=device))
    assert ops_of(backend).sample(logits, options).tolist() == places


@backends()
def test_sample_with_the_largest_number(backend):
    """Where sums of fp32 in another order may not pass it: the token still has a weight."""
    device = device_of(backend)
    logits = randn(20, 9000, device=device)
    logits[:, 4000:] = -torch.inf
    ones = torch.ones(20, dtype=torch.int64, device=device)
    options = Sampling(ones.float(), ones, 8007926 * ones)
    assert uniform(options.seed, options.position)[0] == 1 - 2**-23
    assert (ops_of(backend).sample(logits, options) < 4000).all()


@backends()
def test_sample_from_rows_that_are_apart(backend):
    """As ranks gather them, whose parts of the vocabulary are padded."""
    device = device_of(backend)
    numbers = torch.arange(8, device=device)
    options = Sampling(torch.ones(8, device=device), numbers + 5, numbers)
    padded = 4 * randn(8, 104, device=device)
    expected = sampler.sample(padded[:, :101].contiguous(), options)
    assert torch.equal(ops_of(backend).sample(padded[:, :101], options), expected)


@backends()
def test_a_backend_has_the_functions_of_ops(backend):
    """With the same parameters: a model may be built with any of them."""
    ops = ops_of(backend)
    for name, method in vars(Ops).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            expected = list(inspect.signature(method).parameters)[1:]
            found = inspect.signature(getattr(ops, name)).parameters
            assert list(found)[: len(expected)] == expected, name
            assert all(p.default is not p.empty for p in list(found.values())[len(expected) :])


class Counting(Counter):
    """A backend of a few lines: that of PyTorch, which counts what it is asked for, and records a step of one sequence."""

    NAME, COMPILES_AT_FIRST_USE = "counting", True
    sizes = (1,)

    def __getattr__(self, name: str) -> Any:
        self[name] += 1
        return getattr(torch_ops, name)

    def recorder(self, model, kv_cache, limits):
        self.model = model
        return self

    def record(self, size):
        """Needs nothing."""

    def size_for(self, step):
        return 1 if step.batch.num_decodes == len(step.batch.context_lens) == 1 else None

    def run(self, step, size):
        self["recorder"] += 1
        step.batch.layout = self.layout(step.batch)
        return self.model(step.input_ids, step.positions, step.batch), step


def test_a_new_backend_serves_all_that_the_engine_can_do(tmp_path, monkeypatch):
    """As CONTRIBUTING says: with nothing but the functions of Ops, each of which is called, and the tokens of PyTorch."""
    ops = Counting()
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(n=2, seed=1, max_tokens=12, repetition_penalty=1.1, prompt_logprobs=1),
        BeamSearchParams(beam_width=2, max_tokens=6),
    ]
    dense = {"preemption_mode": "swap", "kv_cache_dtype": "int8", "quantization": "int8"}
    experts = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    cases = [
        ("qwen3", {}, dense),
        ("qwen3_moe", experts, {"quantization": "int4"}),
        ("qwen3_moe", {}, {}),
        ("qwen3_5_text", {}, {}),
    ]
    for i, (family, sizes, options) in enumerate(cases):
        path = save(new_model(family, **sizes), tmp_path / str(i))
        answers = []
        for backend in (torch_ops, ops):
            monkeypatch.setattr(model_runner, "choose_ops", lambda *_, own=backend: own)
            llm = LLM(path, dtype="float32", num_blocks=14, block_size=4, **options)
            outputs = llm.generate([[5] * 9, [7, 8] * 6, [9] * 5], params, use_tqdm=False)
            answers.append([[one.token_ids for one in output.outputs] for output in outputs])
        assert answers[0] == answers[1], family
    functions = {name for name, one in vars(Ops).items() if inspect.isfunction(one)}
    assert {name for name in functions if not name.startswith("_")} <= {*ops}
