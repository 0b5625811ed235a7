"""Requests for a benchmark: of random lengths, as nano-vllm's own benchmark draws them, or from a
recorded trace."""

import csv
import math
import random
from collections.abc import Iterator
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

WORKLOADS = {  # requests, tokens in and out, temperature
    "random": (64, (16, 128), 0.0),
    "nano-vllm": (256, (100, 1024), 0.6),  # nano-vllm's own benchmark: 133,966 output tokens
    "trace": (None, None, 0.0),
}


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0  # seconds after the start


def random_requests(
    count: int, low: int, high: int, seed: int, vocab_size: int, rate: float
) -> list[Request]:
    """Drawn in nano-vllm's order: all prompts, then all lengths. Arrivals are a Poisson process,
    `rate` per second."""
    rng = random.Random(seed)
    prompts = [
        [rng.randint(0, 10000) % vocab_size for _ in range(rng.randint(low, high))]
        for _ in range(count)
    ]
    lengths = [rng.randint(low, high) for _ in range(count)]
    gaps = (rng.expovariate(rate) for _ in range(count - 1))  # 0 if it is inf
    arrivals = accumulate(gaps, initial=0.0)
    return [Request(*request) for request in zip(prompts, lengths, arrivals)]


def lognormal_pairs(
    rng: random.Random, means: tuple[float, float], sigma: float, max_model_len: int
) -> Iterator[tuple[int, int]]:
    """Without end: tokens of a prompt and of its answer, with these means; `sigma` is the standard
    deviation of their logarithms. Pairs of more than `max_model_len` tokens are drawn again."""
    locations = [math.log(mean) - sigma**2 / 2 for mean in means]
    while True:
        prompt, output = (max(1, round(rng.lognormvariate(x, sigma))) for x in locations)
        if prompt + output <= max_model_len:
            yield prompt, output


def read_trace(path: Path, count: int | None, rate: float | None) -> list[tuple[int, int, float]]:
    """(tokens in, tokens out, arrival in seconds) of the first requests; intervals are scaled to
    `rate` per second, or kept if it is None.

    Raises ValueError for a file that is no trace, or too short.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(islice(csv.DictReader(file), count))
        # to the microsecond
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
        lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a CSV of TIMESTAMP,ContextTokens,GeneratedTokens: {error!r}"
        ) from error
    if len(rows) < (count or 1):
        raise ValueError(f"{path} has {len(rows)} requests, not {count or 'any'}")
    seconds = [(t - times[0]).total_seconds() for t in times]
    scale = 1.0 if rate is None else (len(rows) - 1) / rate / (seconds[-1] or 1)
    return [(max(1, n_in), max(1, n_out), t * scale) for (n_in, n_out), t in zip(lengths, seconds)]


def make_requests(args, vocab_size: int) -> list[Request]:
    """What the command line of bench.py asks for."""
    if not args.trace:
        return random_requests(args.requests, *args.tokens, args.seed, vocab_size, args.rate)
    rng, rows = random.Random(args.seed), read_trace(args.trace, args.requests, args.rate)
    return [Request([rng.randrange(vocab_size) for _ in range(n)], out, t) for n, out, t in rows]


def cut(request: Request, max_model_len: int) -> Request:
    """The request, shortened so that it fits into `max_model_len` tokens."""
    prompt = request.prompt[: max_model_len - 1]
    return request._replace(
        prompt=prompt, max_tokens=min(request.max_tokens, max_model_len - len(prompt))
    )


def shifted(requests: list[Request], by: int, vocab_size: int) -> list[Request]:
    """Prompts of the same lengths that no prefix cache knows: `by` is added to every token id."""
    return [r._replace(prompt=[(i + by) % vocab_size for i in r.prompt]) for r in requests]
