"""What is drawn has the right frequencies, and a row draws the same token whatever is beside it.

Run: pytest tests/test_sampler.py [-k greedy]
"""

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanovllm.layers.sampler import Sampling, sample, top_logprobs, uniform

VOCAB = 50


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
        max_top_k=top_k,
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


def test_a_row_draws_the_same_whatever_is_beside_it():
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    position = torch.tensor([5, 9, 1, 7, 3, 2, 8, 4])
    together = sample(logits, sampling(8, seed=11, position=position))
    alone = [
        sample(logits[i : i + 1], sampling(1, seed=11, position=position[i : i + 1])).item()
        for i in range(8)
    ]
    assert together.tolist() == alone
    for name, values in (
        ("top_k", [VOCAB] * 7 + [1]),
        ("top_p", [1.0] * 7 + [0.01]),
        ("min_p", [0.0] * 7 + [1.0]),
    ):
        # what a neighbour asks for filters only the neighbour
        filtered = sampling(8, seed=11, position=position)
        setattr(filtered, name, torch.tensor(values))
        assert sample(logits, filtered).tolist() == [*alone[:7], logits[7].argmax()]


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


def test_top_logprobs():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    values, ids = top_logprobs(logits, torch.tensor([0]), 2)
    assert ids.tolist() == [[0, 1, 3]]
    torch.testing.assert_close(values[0], logits.log_softmax(-1)[0, [0, 1, 3]])
