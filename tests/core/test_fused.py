"""The fused kernels of the small layers against plain PyTorch, in Triton's interpreter or on a GPU.

Run: pytest tests/core/test_fused.py [-k norm]
"""

import inspect
import random

import pytest
import torch

from nanovllm.layers import sampler, torch_ops, torch_sampler, triton_ops
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import Sampling, uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

ROUNDING = 2e-6  # of a share: fp32 sums of these rows are off by 2e-7


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        DEVICE, dtype
    )


def norm(size, dtype, seed=0):
    layer = torch.nn.RMSNorm(size, 1e-6).to(DEVICE, dtype).requires_grad_(False)
    layer.weight.data.copy_(1 + 0.2 * randn(seed + 1, size)[seed])
    return layer


def assert_close(actual, expected):
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 64, 200])
def test_add_and_norm(size, dtype):
    layer = norm(size, dtype)
    update = randn(5, size, dtype=dtype)
    x = 3 * randn(5, size, dtype=dtype)
    added = x + update
    for backend in (torch_ops, triton_ops):
        in_place = x.clone()
        total, normed = backend.add_and_norm(in_place, update, layer)
        assert total is in_place
        if backend is torch_ops:
            expected = normed
            assert torch.equal(total, added)
        assert_close(total, added)  # the interpreter cuts bfloat16 off where a GPU rounds
        assert_close(normed, expected)


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_and_rotate(head_dim, has_norm, dtype):
    sizes = [6, 2, 2]
    norms = [norm(head_dim, dtype, seed) for seed in (1, 2)] if has_norm else [None, None]
    angles = randn(7, head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    qkv = randn(7, 10, head_dim, dtype=dtype)
    expected = torch_ops.norm_and_rotate(qkv.clone(), *norms, cos_sin, sizes)
    actual = triton_ops.norm_and_rotate(qkv.clone(), *norms, cos_sin, sizes)
    for part, reference in zip(actual, expected):
        assert_close(part, reference)
    assert torch.equal(actual[2], qkv[:, 8:])  # values are left alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 72, 1030])
def test_silu_and_mul(size, dtype):
    x = randn(5, 2 * size, dtype=dtype)
    assert_close(triton_ops.silu_and_mul(x), torch_ops.silu_and_mul(x))


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
def test_sample(vocab_size):
    """The token that each row's number selects, greedy rows among them; whole tiles, parts of one, several."""
    rows = 40
    options = Sampling(
        temperature=torch.tensor([0.0, 1.0, 0.6, 1e-3, 5.0] * 8).to(DEVICE),
        seed=torch.tensor([2**63 - 1 - 3**i for i in range(rows)]).abs().to(DEVICE),
        position=torch.arange(rows).to(DEVICE) * 1000,
    )
    logits = 4 * randn(rows, vocab_size)
    logits[7, : vocab_size // 2] = -100.0  # half of the vocabulary has weights of about 0
    logits[5, [0, vocab_size - 1]] = 99.0  # the first of equal logits, also of two tiles
    for backend in (torch_ops, triton_ops):
        tokens = backend.sample(logits, options)
        assert torch.equal(tokens[::5], logits[::5].argmax(-1))
        assert is_drawn(tokens, logits, options).all() and len(set(tokens.tolist())) > 3
        neighbors = is_drawn((tokens + 1) % vocab_size, logits, options)
        assert neighbors.sum() < 0.1 * rows, "the check lets other tokens pass"


def test_sample_from_rows_that_are_apart():
    """As ranks gather them, whose parts of the vocabulary are padded."""
    options = Sampling(torch.ones(8), torch.arange(8) + 5, torch.arange(8))
    options = Sampling(*(part.to(DEVICE) for part in list(vars(options).values())[:3]))
    padded = 4 * randn(8, 104)
    expected = torch_ops.sample(padded[:, :101].contiguous(), options)
    assert torch.equal(triton_ops.sample(padded[:, :101], options), expected)


@pytest.mark.slow
def test_sample_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    rows = 600
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    options = Sampling(
        torch.ones(rows, device=DEVICE),
        seed=zeros,
        position=zeros + torch.arange(rows, device=DEVICE),
    )
    tokens = triton_ops.sample(probabilities.log().expand(rows, 5).contiguous().to(DEVICE), options)
    counts = tokens.bincount(minlength=5).cpu() / rows
    assert counts[1] == 0 and (counts - probabilities).abs().max() < 0.05


FILTERS = {
    "top_p": [0.1, 0.5, 0.9, 0.999, 1.0, 1e-9],
    "min_p": [0.0, 0.0, 0.05, 0.5, 1.0],
    "top_k": [1, 3, 10**9, 10**9],
}


@pytest.mark.slow(but_every=14)
@pytest.mark.filterwarnings("ignore:invalid:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "names", ["top_p", "min_p", "top_p min_p", "top_p top_k", "top_p min_p top_k"]
)
def test_a_cutoff_without_sorting_keeps_the_same_tokens(names, dtype, monkeypatch):
    """Ties, tokens without a weight, steep rows and flat ones, beside greedy rows. Only a small top_k asks PyTorch."""
    plain = torch_sampler.cutoff
    rng = random.Random(names)

    def short(logits, options):
        assert options.all_have_top_k, "it would sort, and wait"
        return plain(logits, options)

    rows = 4
    for vocab_size in 7, 300, 5000:
        logits = (randn(rows, vocab_size) * rng.choice([0.1, 1, 5, 30])).to(dtype)
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
            options.all_have_top_k = bool(is_limited.equal(is_drawn))
        for name, part in vars(options).items():
            if isinstance(part, torch.Tensor):
                setattr(options, name, part.to(DEVICE))
        monkeypatch.setattr(torch_sampler, "cutoff", short)
        found = triton_ops.cutoff(logits, options).view(-1, 1)
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
    assert triton_ops.cutoff(logits, options).tolist() == [0.0, -1.0, -1.0]


def test_rows_with_filters_are_pytorchs():
    rows = torch.arange(4, device=DEVICE)
    options = Sampling(torch.ones_like(rows).float(), seed=rows, position=rows)
    options.top_k = torch.full_like(rows, 2)
    logits = randn(4, 50)
    assert torch.equal(triton_ops.sample(logits, options), torch_ops.sample(logits, options))


def test_both_backends_have_the_functions_of_ops():
    """With the same parameters: a model may be built with either."""
    for name, method in vars(Ops).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            expected = list(inspect.signature(method).parameters)[1:]
            for backend in (torch_ops, triton_ops):
                found = inspect.signature(getattr(backend, name)).parameters
                assert list(found)[: len(expected)] == expected, f"{backend.__name__}.{name}"
                assert all(p.default is not p.empty for p in list(found.values())[len(expected) :])
