"""What is drawn has the right frequencies, and a row draws the same token whatever is beside it. The short cut that looks
only at a row's highest logits gives the same tokens.

Run: pytest tests/core/test_sampler.py [-k greedy]
"""

import random

import pytest
import torch
from backends import ops_of
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanovllm.layers import sampler as plain
from nanovllm.layers.sampler import Sampling, top_logprobs, uniform
from nanovllm.layers.torch_sampler import sample
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Request
from nanovllm.step import SMALL, sampling_of

VOCAB = 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sampling(
    rows: int, temperature=1.0, top_k=None, top_p=None, min_p=None, seed=0, position=None
) -> Sampling:
    def column(value, dtype=torch.float32):
        return None if value is None else torch.full((rows,), value, dtype=dtype)

    return Sampling(
        temperature=column(temperature),
        seed=column(seed, torch.int64),
        position=torch.arange(rows) if position is None else position,
        top_k=column(top_k, torch.int64),
        top_p=column(top_p),
        min_p=column(min_p),
        max_top_k=top_k or 0,
        all_top_k_small=top_k is not None,
    )


def splitmix64(x: int) -> int:
    """The published integer mixing function, in plain Python."""
    mask = 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def test_uniform_is_splitmix64():
    seeds, positions = [0, 1, 12345, 2**63 - 1, 2**62 + 7], [0, 1, 2, 77, 10**6]
    mask = 2**64 - 1
    expected = [
        (splitmix64(splitmix64(s) + p * 0x9E3779B97F4A7C15 & mask) >> 41) / 2**23
        for s, p in zip(seeds, positions)
    ]
    assert uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_uniform_looks_uniform_over_positions_and_over_seeds():
    many = torch.arange(100_000)
    for u in (uniform(torch.full_like(many, 3), many), uniform(many, torch.full_like(many, 3))):
        assert 0 <= u.min() and u.max() < 1
        counts = torch.histc(u, bins=100, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert 50 < chi_square < 160  # 99 degrees of freedom
        assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 7, "top_p": 0.8},
        {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 1},
    ],
)
def test_frequencies_are_those_of_transformers_filters(options):
    draws = 40_000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    tokens = sample(logits.expand(draws, -1), sampling(draws, **options))
    scores = (logits / options.get("temperature", 1.0)).unsqueeze(0)
    for name, warper in (
        ("min_p", MinPLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        if name in options:
            scores = warper(options[name])(None, scores)
    expected = scores.softmax(-1)[0]
    found = torch.bincount(tokens, minlength=VOCAB) / draws
    assert found[expected == 0].sum() == 0  # nothing that the filters exclude
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_greedy_rows_beside_random_ones():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    mixed = sampling(3)
    mixed.temperature = torch.tensor([0.0, 1.0, 0.0])
    tokens = sample(logits, mixed)
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()
    assert torch.equal(sample(logits, sampling(len(logits), temperature=0.0)), logits.argmax(-1))


def test_tiny_temperatures_are_greedy_and_finite():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(5)) * 30
    assert torch.equal(sample(logits, sampling(5, temperature=1e-6)), logits.argmax(-1))


def test_the_sum_must_pass_the_number():
    """Eight equal tokens; these positions have the numbers 0/8 to 7/8."""
    positions = [1238569, 1719163, 2423325, 4987235, 4970968, 3962215, 1478854, 10220519]
    options = sampling(8, seed=1, position=torch.tensor(positions))
    logits = torch.full((8, 9), -torch.inf)
    logits[:, 1:] = 0.0
    assert plain.sample(logits, options).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_row_with_top_p_of_1_keeps_the_smallest_weights():
    """Of about 0, so that no sum shows them."""
    options = sampling(2)
    options.top_p = torch.tensor([1.0, 0.5])
    ranked = torch.tensor([[0.0, -60.0]]).expand(2, -1)
    assert plain.lowest_kept(ranked, options).tolist() == [[-60.0], [0.0]]


def test_logits_of_16_bits_are_computed_in_fp32():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)).bfloat16()
    ids = torch.tensor([1, 2, 3])
    for function in (plain.softmax_weights, lambda x, _: top_logprobs(x, ids, 2)[0]):
        found, expected = (function(x, sampling(3, 0.7)) for x in (logits, logits.float()))
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_top_logprobs():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    values, ids = top_logprobs(logits, torch.tensor([0]), 2)
    assert ids.tolist() == [[0, 1, 3]]
    torch.testing.assert_close(values[0], logits.log_softmax(-1)[0, [0, 1, 3]])


# --- few logits are looked at ---

KEEP_ALL = 3000
FILTERS = [  # temperature, top_k, top_p, min_p: of one row each
    (0.6, 20, 0.95, 0.0),  # Qwen's
    (0.6, KEEP_ALL, 0.9, 0.0),  # Llama's
    (1.0, KEEP_ALL, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.5, KEEP_ALL, 1.0, 0.1),
    (0.0, KEEP_ALL, 1.0, 0.0),
    (2.0, 1500, 0.9, 0.0),  # more than are looked at first
    (2.0, 1, 1.0, 0.0),
    (1.0, 30, 0.8, 0.05),
    (9.0, KEEP_ALL, 0.99, 0.0),  # almost flat: top_p keeps most
]


def row_logits(dtype, ties: bool) -> torch.Tensor:
    logits = torch.randn(len(FILTERS), KEEP_ALL, generator=torch.Generator().manual_seed(8)) * 3
    return (logits.round() if ties else logits).to(DEVICE, dtype)


def requested(rows: list[int]) -> Sampling:
    """As ModelRunner makes it: row i wants FILTERS[i]; what no row wants is None."""
    wanted = torch.tensor([FILTERS[row] for row in rows], device=DEVICE)
    numbers = torch.tensor(rows, device=DEVICE)
    temperature, top_k, top_p, min_p = wanted.T.contiguous()
    top_k, is_drawn = top_k.long(), temperature > 0
    is_limited = is_drawn & (top_k < KEEP_ALL)
    return Sampling(
        temperature,
        seed=numbers * 12345,
        position=numbers + 7,
        top_k=top_k if is_limited.any() else None,
        top_p=top_p if (top_p[is_drawn] < 1).any() else None,
        min_p=min_p if (min_p[is_drawn] > 0).any() else None,
        max_top_k=max(top_k[is_limited].tolist(), default=0),
        all_top_k_small=bool(is_limited.any() and is_limited.equal(is_drawn)),
    )


def drawn_plainly(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """The definition, row by row, in float64, all of the vocabulary sorted."""
    tokens = []
    for i, row in enumerate(logits.double()):
        kinds = (sampling.top_k, sampling.top_p, sampling.min_p)
        top_k, top_p, min_p = (None if kind is None else kind[i].item() for kind in kinds)
        temperature = sampling.temperature[i].item()
        if temperature == 0:
            tokens.append(row.argmax().item())
            continue
        weights = ((row - row.max()) / temperature).exp()
        weights[weights < (min_p or 0)] = 0
        top = weights.sort(descending=True).values[:top_k]
        if top_p is not None and top_p < 1:
            top = top[top.cumsum(0) - top < top_p * top.sum()]
        weights[weights < top[-1]] = 0
        u = uniform(sampling.seed[i : i + 1], sampling.position[i : i + 1]).double()
        tokens.append((weights.cumsum(0) > u * weights.sum()).int().argmax().item())
    return tokens


@pytest.mark.parametrize("vocab_size", [5, 200, 1023, 1024, 1025, 40_000, 151_936])
def test_a_row_draws_alone_what_it_draws_in_any_mixture(vocab_size):
    """Of all parameters. Also where the vocabulary is not larger than what the short cut looks at."""
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(8 if vocab_size < 10_000 else 1):
        requests = []
        for i in range(12):
            choices = dict(
                temperature=[0, 0.01, 0.7, 1, 3], top_p=[1, 1, 0.9, 0.3, 0.001], min_p=[0, 0, 0.05, 1],
                top_k=[0, 0, 1, 3, 50, 64, 65, 1000, vocab_size - 1, vocab_size, 10**6], seed=[i],
            )  # fmt: skip
            params = SamplingParams(
                **{name: rng.choice(values) for name, values in choices.items()}
            )
            requests.append(Request("a", None, [1] * rng.randrange(1, 9), params))
        seqs = [request.sequences[0] for request in requests]
        logits = torch.randn(12, vocab_size, generator=generator, device="cpu")
        logits *= torch.tensor([0.1, 1, 6]).repeat(4)[:, None]
        together = sample(logits, sampling_of(seqs, vocab_size)).tolist()
        alone = [
            sample(logits[[i]], sampling_of([seq], vocab_size)).item() for i, seq in enumerate(seqs)
        ]
        assert together == alone
        assert alone == plain.sample(logits, sampling_of(seqs, vocab_size)).tolist()


@pytest.mark.parametrize(
    "temperatures, top_ks, expected",
    [
        ([0, 0], [5, 5], (None, 0, False)),  # greedy rows use no filter
        ([0, 1], [0, 2000], ([3000, 2000], 2000, False)),
        ([0, 1], [0, SMALL], ([3000, SMALL], SMALL, True)),
        ([1, 1], [5, SMALL + 1], ([5, SMALL + 1], SMALL + 1, False)),
        ([1, 1], [5, 0], ([5, 3000], 5, False)),
    ],
)
def test_a_filter_that_no_row_uses_is_none(temperatures, top_ks, expected):
    def made(**fields):
        all_params = [
            SamplingParams(temperature=temperature, top_k=top_k, **fields)
            for temperature, top_k in zip(temperatures, top_ks)
        ]
        return sampling_of([Request("a", None, [1], p).sequences[0] for p in all_params], 3000)

    one = made()
    found = None if one.top_k is None else one.top_k.tolist()
    assert (found, one.max_top_k, one.all_top_k_small) == expected
    assert one.top_p is one.min_p is None
    both = made(top_p=0.9, min_p=0.5)
    assert (both.top_p is None) == (both.min_p is None) == (max(temperatures) == 0)


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_whatever_filters_are_beside_it(dtype, ties, backend):
    """The neighbors decide how many logits are looked at, and whether in a second attempt."""
    ops, logits = ops_of(backend), row_logits(dtype, ties)

    def drawn(rows):
        return ops.sample(logits[rows], requested(rows)).tolist()

    alone = [drawn([row])[0] for row in range(10)]
    assert alone == drawn_plainly(logits[:10], requested(range(10)))
    for kinds in ([0, 3, 7, 8], [0, 2], [0, 9], [1, 9], [4, 2], [6, 0], [6, 1], [5, 7], range(10)):
        rows = list(kinds)
        assert drawn(rows) == [alone[row] for row in rows], kinds


@pytest.mark.parametrize("width", [3, 100])
def test_tokens_that_equal_the_last_one_kept_are_kept(width):
    """Also if there are more of them than are looked at; but top_p counts only top_k of them."""
    logits = torch.full((1, KEEP_ALL), -5.0)
    logits[:, 5:12] = 3.0
    logits[:, 1000 : 1000 + width] = 2.0
    draws = 2000
    for filters in (dict(top_k=8), dict(top_k=9, top_p=0.99)):
        tokens = sample(logits.expand(draws, -1), sampling(draws, **filters))
        assert tokens[:99].tolist() == drawn_plainly(logits.expand(99, -1), sampling(99, **filters))
        assert len(tokens.unique()) == 7 + width
    narrow = sample(logits.expand(draws, -1), sampling(draws, top_k=9, top_p=0.5))
    assert set(narrow.tolist()) == set(range(5, 12))
