"""Checks of chapter 08: the filters on a list, a number for each token, top_p without a sort."""

from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from nanovllm.layers.sampler import uniform
from tutorials.exercises.checks.expect import Wrong, expect, unchanged

PROBS = [0.40, 0.25, 0.15, 0.10, 0.06, 0.04]
GOLDEN = 0x9E3779B97F4A7C15  # between the seeds of a request's answers, see Sequence.seed


def check_1(answers) -> None:
    mixed = [0.04, 0.25, 0.10, 0.40, 0.06, 0.15]
    halves = [0.5, 0.25, 0.125, 0.125]
    for probs, options, wanted in (
        (PROBS, (0.5, 0.05, 3, 0.9), [0.719, 0.281, 0, 0, 0, 0]),
        (PROBS, (1.0, 0, 9, 1.0), PROBS),
        ([0.75, 0.0, 0.25], (0.5, 0, 0, 1.0), [0.9, 0, 0.1]),
        (PROBS, (2.0, 0, 0, 1.0), [0.277, 0.219, 0.17, 0.139, 0.107, 0.088]),
        (PROBS, (1.0, 0.2, 0, 1.0), [0.444, 0.278, 0.167, 0.111, 0, 0]),
        (PROBS, (0.5, 0.2, 0, 1.0), [0.719, 0.281, 0, 0, 0, 0]),
        (PROBS, (1.0, 0, 2, 1.0), [0.615, 0.385, 0, 0, 0, 0]),
        (PROBS, (1.0, 0, 0, 0.7), [0.5, 0.312, 0.188, 0, 0, 0]),
        (PROBS, (1.0, 0, 3, 0.8), [0.615, 0.385, 0, 0, 0, 0]),
        (PROBS, (1.0, 0, 0, 0.001), [1, 0, 0, 0, 0, 0]),
        (halves, (1.0, 0, 0, 0.75), [0.667, 0.333, 0, 0]),
        (halves, (1.0, 0.5, 0, 1.0), [0.667, 0.333, 0, 0]),
        (mixed, (1.0, 0, 0, 0.7), [0, 0.312, 0, 0.5, 0, 0.188]),
        (mixed, (1.0, 0.2, 3, 1.0), [0, 0.312, 0, 0.5, 0, 0.188]),
    ):
        given = [*map(float, unchanged(answers.filtered, probs, *options))]
        said = [round(p, 3) for p in given]
        close = len(said) == len(wanted) and all(abs(a - b) < 2e-3 for a, b in zip(said, wanted))
        names = ", ".join(map(str, options))
        expect(abs(sum(given) - 1) < 1e-9, f"filtered({probs}, {names}) has the sum {sum(given)}")
        expect(close, f"filtered({probs}, {names}) is {said}, and should be {wanted}")


# --- 08.2 ---
def tokens_of(answers, seed: Tensor, position: Tensor, logits=None) -> Tensor:
    logits = torch.tensor(PROBS).log() if logits is None else logits
    tokens = answers.gumbel_tokens(logits.expand(len(seed), -1), seed, position, uniform)
    shape = list(tokens.shape)
    expect(shape == [len(seed)], f"for {len(seed)} rows the result has the shape {shape}")
    return tokens


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def check_2(answers) -> None:
    n = 20_000
    probs = torch.tensor(PROBS)
    many = torch.arange(n)
    seven = torch.full((n,), 7)
    golden = GOLDEN - 2**64  # as a signed integer
    rows = {
        "a position and the next": (seven, many, seven, many + 1),
        "a position and the one after the next": (seven, many, seven, many + 2),
        "a seed and the next": (many, seven, many + 1, seven),
        "a seed and the next, one position earlier": (many, seven, many + 1, seven - 1),
        "two answers of one request": (many, seven, many + golden, seven),
        "two answers, one a position earlier": (many, seven, many + golden, seven - 1),
    }
    for name, (seed, position, other_seed, other_position) in rows.items():
        one = tokens_of(answers, seed, position)
        other = tokens_of(answers, other_seed, other_position)
        seen = chi_square(one.bincount(minlength=6), probs)  # 5 degrees of freedom
        share = (one == 0).float().mean().item()
        expect(seen < 30, f"token 0 has the probability 0.4 and is drawn {share:.3f} of the time")
        pairs = (one * 6 + other).bincount(minlength=36)
        seen = chi_square(pairs, probs.outer(probs).flatten())  # 35 degrees of freedom
        equal = (one == other).float().mean().item()
        by_chance = sum(p * p for p in PROBS)
        said = (
            f"the tokens of {name} hang together: {equal:.3f} are equal, by chance {by_chance:.3f}"
        )
        expect(seen < 90, said)

    seeds, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([30, 3, 11, 20])
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    batch = answers.gumbel_tokens(logits, seeds, positions, uniform).tolist()
    for i in range(4):
        row = slice(i, i + 1)
        (alone,) = answers.gumbel_tokens(logits[row], seeds[row], positions[row], uniform).tolist()
        expect(alone == batch[i], f"row {i} draws {batch[i]} in a batch, and {alone} alone")

    cut = torch.tensor([[-torch.inf, -torch.inf, 1.0, -torch.inf]])
    for u in (0.0, 1 - 2**-23):

        def same_number(seed, position, u=u):
            return torch.full_like(torch.as_tensor(seed) + position, u, dtype=torch.float32)

        (token,) = answers.gumbel_tokens(cut, seeds[:1], positions[:1], same_number).tolist()
        expect(token == 2, f"only token 2 is not cut off, but if u is {u:.7f} it draws {token}")
    check_small_numbers(answers)
    check_smallest_number(answers)
    check_large_vocabulary(answers)


def check_small_numbers(answers) -> None:
    """Two equal tokens whose numbers are among the 16 smallest."""

    def smallest(seed, position):
        return (uniform(seed, position) * 16).floor() / 2**23

    n = 4000
    logits = torch.zeros(n, 2)
    tokens = answers.gumbel_tokens(logits, torch.full((n,), 7), torch.arange(n), smallest)
    share = (tokens == 0).float().mean().item()  # of 16 pairs one is equal: then token 0 is first
    said = f"if all numbers are below 0.000002, the first of two equal tokens wins {share:.0%}"
    expect(0.4 < share < 0.6, f"{said} of the time; small numbers must differ, too")


def check_smallest_number(answers) -> None:
    """With the number 2^-23, the first token has not quite enough to win over 0.5."""

    def one_of_two(seed, position):
        return torch.where(uniform(seed, position) < 0.5, 2.0**-23, 0.5)

    n = 4000
    logits = torch.tensor([[3.1225, 0.0]]).expand(n, -1)
    tokens = answers.gumbel_tokens(logits, torch.full((n,), 7), torch.arange(n), one_of_two)
    share = (tokens == 0).float().mean().item()
    said = f"if each number is 2^-23 or 0.5, a token with the logit 3.1225 wins {share:.0%} over 0"
    hint = "Is 2^-23 still 2^-23?"
    expect(0.7 < share < 0.8, f"{said}, and should win 75%. {hint}")


def check_large_vocabulary(answers) -> None:
    """The pairs that are given to uniform, for the vocabulary of Qwen3."""
    keys = []

    def recorded(seed, position):
        seed, position = torch.broadcast_tensors(torch.as_tensor(seed), torch.as_tensor(position))
        # a hash of the pair, which wraps around
        keys.append((mixed(seed.long()) + position.long() * 0x5851F42D4C957F2D).flatten())
        return uniform(seed, position)

    seeds, positions = torch.tensor([5, 5, 6, 6]), torch.tensor([7, 8, 7, 8])
    answers.gumbel_tokens(torch.zeros(4, 151_936), seeds, positions, recorded)
    pairs = torch.cat(keys)
    num_shared = len(pairs) - len(pairs.unique())
    said = f"with 151,936 tokens, {num_shared:,} of {len(pairs):,} numbers are used twice"
    expect(num_shared == 0, said)


def mixed(seed: Tensor) -> Tensor:
    seed = seed * 0x2545F4914F6CDD1D
    return (seed ^ (seed >> 29)) * 0x369DEA0F31A53F85


# --- 08.3 ---
def kept_by_sort(probs: Tensor, top_p: float) -> Tensor:
    ranked, ids = probs.sort(1, descending=True)
    is_needed = ranked.cumsum(1) - ranked < top_p
    lowest = ranked.masked_fill(~is_needed, 2).amin(1, keepdim=True)
    return probs >= lowest


SORTS = ("sort", "topk", "argsort", "msort", "kthvalue", "unique")
WAYS_OUT = ("numpy", "tolist", "__array__", "__iter__")  # NumPy sorts as well, and Python, too


def refuse(*args, **kwargs):
    raise Wrong("it sorts, or calls topk")


def leave_torch(*args, **kwargs):
    raise Wrong("it leaves torch, or goes over rows or tokens in a loop")


@cache
def cases_of_cutoffs() -> list[tuple[str, Tensor, float, Tensor]]:
    """Name, probabilities, top_p, and what is kept then."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(100, 5000, dtype=torch.float64, generator=generator)
    halves = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    flat = torch.full((1, 4096), 2.0**-12, dtype=torch.float64)
    sure = torch.zeros(1, 4096, dtype=torch.float64)
    sure[0, 7] = 1
    cases = {
        "100 rows of 5,000 tokens": ((3 * scores).softmax(1), 0.9),
        "the same rows": ((3 * scores).softmax(1), 0.3),
        "rows of which some are flat": (
            (torch.linspace(0, 9, 100)[:, None] * scores).softmax(1),
            0.95,
        ),
        "rows with a tail of tiny probabilities": ((20 * scores[:5]).softmax(1), 0.999999999),
        "[0.5, 0.25, 0.125, 0.125]": (halves, 0.75),
        "the same four": (halves, 0.6),
        "these": (halves, 0.8),
        "4,096 equal tokens": (flat, 0.5),
        "a single sure token": (sure, 0.9),
    }
    return [
        (name, probs, top_p, kept_by_sort(probs, top_p)) for name, (probs, top_p) in cases.items()
    ]


def check_3(answers) -> None:
    for name, probs, top_p, wanted in cases_of_cutoffs():
        owners = [(owner, n) for n in SORTS for owner in (torch, Tensor) if hasattr(owner, n)]
        patches = [patch.object(owner, n, refuse) for owner, n in owners]
        patches += [patch.object(Tensor, n, leave_torch) for n in WAYS_OUT]
        for each in patches:
            each.start()
        try:
            lowest = answers.lowest_kept(probs.clone(), top_p)
        finally:
            for each in patches:
                each.stop()
        kept = probs >= lowest
        expect(kept.shape == wanted.shape, f"c has the shape {list(lowest.shape)}")
        for row, (mine, right) in enumerate(zip(kept.sum(1).tolist(), wanted.sum(1).tolist())):
            said = (
                f"{name}, top_p {top_p}, row {row}: {mine} tokens are kept, and should be {right}"
            )
            expect(mine == right, said)
