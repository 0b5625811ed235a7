"""Jobs for the simulator: when they arrive, how long they are, what they share. Standard library
only, no torch.

    workload(poisson(rate=4), sharegpt(), 1000)                             # 1000 chats, 4 per second
    predicted(workload(gamma(4, cv=3), alpaca(), 1000), sigma=0.5)          # in bursts, with a guess of their lengths
    merged(multi_turn(all_at_once(), sharegpt(), 8), azure("trace.csv"))    # 8 users in conversations, beside a recorded load

Arrivals and lengths are iterators without end. A workload takes from them what it needs. All that
is random depends only on `seed`. Nothing is shared by accident: each prompt and each answer has a
token id of its own.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanovllm.options import is_int, is_number, shown
from nanovllm.topics.simulator.jobs import Job, Runs
from tutorials.baselines.replay import MEANS
from tutorials.simulation.requests import lognormal_pairs, read_trace

MOST_RIGHT = 16  # guesses in a row

Arrivals = Iterable[float]  # seconds since the start, in order
Lengths = Iterable[tuple[int, int]]  # tokens of a prompt and of its answer


def require(name: str, value: object, is_allowed: object, allowed: str) -> None:
    """Raises a ValueError with the argument's name, its value and what is allowed."""
    if not is_allowed:
        raise ValueError(f"{name}={shown(value)} is not allowed: it must be {allowed}")


def require_positive(**numbers: object) -> None:
    for name, value in numbers.items():
        require(name, value, is_number(value, 0) and value != 0, "a positive number")


def require_counts(**counts: object) -> None:
    for name, value in counts.items():
        require(name, value, is_int(value, 1), "a positive integer")


def generator(name: str, seed: int) -> random.Random:
    """Random numbers of its own for each name: otherwise long gaps and long prompts would come
    together."""
    require("seed", seed, is_int(seed, 0), "an integer, 0 or more")
    return random.Random(f"{name} {seed}")


# --- arrivals ---


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Independent arrivals, on average `rate` per second: the gaps are exponentially
    distributed."""
    require_positive(rate=rate)
    rng = generator("poisson", seed)
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.repeat(None))


def gamma(rate: float, cv: float, seed: int = 0) -> Iterator[float]:
    """Gaps with a coefficient of variation (standard deviation / mean) of `cv`. Below 1: regular.
    1: Poisson. Above 1: bursts."""
    require_positive(rate=rate, cv=cv)
    rng, shape = generator("gamma", seed), cv**-2
    return itertools.accumulate(
        rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.repeat(None)
    )


def all_at_once() -> Iterator[float]:
    """All at the start: what counts is throughput."""
    return itertools.repeat(0.0)


# --- lengths ---


def fixed(prompt: int, output: int) -> Iterator[tuple[int, int]]:
    """All requests have these lengths in tokens."""
    require_counts(prompt=prompt, output=output)
    return itertools.repeat((prompt, output))


def lognormal(
    prompt: float, output: float, sigma: float = 1.0, max_model_len: int = 2048, seed: int = 0
) -> Iterator[tuple[int, int]]:
    """Lengths with these means, in tokens; `sigma` is the standard deviation of their logarithms. A
    request of more than `max_model_len` tokens is drawn again, which makes the means somewhat
    smaller."""
    require_positive(prompt=prompt, output=output, sigma=sigma)
    require(
        "max_model_len",
        max_model_len,
        is_int(max_model_len, prompt + output),
        "an integer, at least both means",
    )
    rng = generator("lengths", seed)
    return lognormal_pairs(rng, (prompt, output), sigma, max_model_len)


def sharegpt(max_model_len: int = 2048, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Chats: the mean lengths are ShareGPT's in the PagedAttention paper. Log-normal is our
    assumption."""
    return lognormal(*MEANS["ShareGPT"], max_model_len=max_model_len, seed=seed)


def alpaca(max_model_len: int = 2048, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Short instructions: the mean lengths are Alpaca's in the PagedAttention paper.
    Log-normal is our assumption."""
    return lognormal(*MEANS["Alpaca"], max_model_len=max_model_len, seed=seed)


# --- workloads ---


def take(name: str, items: Iterable, count: int) -> list:
    """The first `count` items."""
    require_counts(count=count)
    taken = list(itertools.islice(items, count))
    require(name, taken, len(taken) == count, f"{count} items or more")
    return taken


def new_job(time: float, prompt: Runs, output: int, answer: int, **fields: Any) -> Job:
    """The client's `max_tokens` cuts no answer off."""
    return Job(
        time, prompt, output, answer, max(output, Job._field_defaults["max_tokens"]), **fields
    )


def workload(
    arrivals: Arrivals,
    lengths: Lengths,
    count: int,
    prefixes: Iterable[Runs] | None = None,
    labels: Iterable[dict[str, Any]] | None = None,
) -> list[Job]:
    """`count` independent requests, with token ids from 1 to 2 * `count`. Each takes the next item
    of each iterable.

    `prefixes` are what prompts begin with, before the tokens that `lengths` says; `labels` become
    `extra_args`.
    """
    times, pairs = take("arrivals", arrivals, count), take("lengths", lengths, count)
    require("arrivals", times, times == sorted(times), "in order")
    starts = [()] * count if prefixes is None else take("prefixes", prefixes, count)
    extras = [{}] * count if labels is None else take("labels", labels, count)
    return [
        new_job(time, (*prefix, (i, n_in)), n_out, i + 1, extra_args=dict(label))
        for i, time, (n_in, n_out), prefix, label in zip(
            itertools.count(1, 2), times, pairs, starts, extras
        )
    ]


def azure(path: str | Path, count: int | None = None, rate: float | None = None) -> list[Job]:
    """The first `count` requests of a recorded trace, a CSV of
    TIMESTAMP,ContextTokens,GeneratedTokens; None: all.

    `rate` scales the gaps to this number of requests per second. None keeps the recorded times.
    """
    require("count", count, count is None or is_int(count, 1), "a positive integer or None")
    require(
        "rate",
        rate,
        rate is None or (is_number(rate, 0) and rate != 0),
        "a positive number or None",
    )
    rows = read_trace(Path(path), count, rate)
    return workload([time for *_, time in rows], [row[:2] for row in rows], len(rows))


def multi_turn(
    arrivals: Arrivals,
    lengths: Lengths,
    count: int,
    turns: float = 4,
    think: float = 5.0,
    system_tokens: int = 0,
    max_model_len: int = 8192,
    seed: int = 0,
) -> list[Job]:
    """`count` conversations in a closed loop: a user reads an answer, thinks, and then sends all so
    far and a question.

    Each pair of `lengths` is a question and its answer. On average a conversation has `turns` turns
    (geometrically distributed), unless the next one does not fit into `max_model_len` tokens.
    `think` is the mean number of seconds from the end of an answer to the next turn (exponentially
    distributed). All prompts begin with the same `system_tokens` tokens.
    """
    require("turns", turns, is_number(turns, 1), "a number, 1 or more")
    require("think", think, is_number(think, 0), "a number of seconds, 0 or more")
    require("system_tokens", system_tokens, is_int(system_tokens, 0), "an integer, 0 or more")
    rng = generator("turns", seed)
    ids = itertools.count(2)
    lengths = iter(lengths)
    jobs: list[Job] = []
    for start in sorted(take("arrivals", arrivals, count)):
        time, context, after = start, ((1, system_tokens),) * (system_tokens > 0), None
        while True:
            n_in, n_out = take("lengths", lengths, 1)[0]
            job = new_job(time, (*context, (next(ids), n_in)), n_out, next(ids), after=after)
            if (total := job.num_prompt_tokens + n_out) > max_model_len:
                require(
                    "max_model_len",
                    max_model_len,
                    after is not None,
                    f"at least {total}: a first turn has this number",
                )
                break
            jobs.append(job)
            if rng.random() * turns < 1:
                break
            time, context, after = rng.expovariate(1) * think, job.conversation, len(jobs) - 1
    return jobs


def shared_prefix(
    arrivals: Arrivals,
    lengths: Lengths,
    count: int,
    num_prefixes: int = 8,
    prefix_tokens: int = 1024,
    skew: float = 1.0,
    seed: int = 0,
) -> list[Job]:
    """Questions about a few long documents. Zipf's law: the k-th is asked about in proportion to
    k^-`skew`."""
    require_counts(count=count, num_prefixes=num_prefixes, prefix_tokens=prefix_tokens)
    require("skew", skew, is_number(skew, 0), "a number, 0 or more")
    weights = [k**-skew for k in range(1, num_prefixes + 1)]
    first = 2 * count + 1  # workload takes the ids below
    chosen = generator("prefixes", seed).choices(
        range(first, first + num_prefixes), weights, k=count
    )
    return workload(arrivals, lengths, count, prefixes=[((i, prefix_tokens),) for i in chosen])


def tenants(rates: Mapping[str, float], lengths: Lengths, count: int, seed: int = 0) -> list[Job]:
    """`count` requests of several tenants. Each tenant's arrivals are a Poisson process of its own
    rate per second.

    extra_args["tenant"] says whose a request is. For tenants with different lengths, see `labelled`
    and `merged`.
    """
    require(
        "rates",
        rates,
        isinstance(rates, Mapping) and rates,
        "a rate for each of one or more tenants",
    )
    require_counts(count=count)
    require_positive(**{f"rates[{name!r}]": rate for name, rate in rates.items()})
    chosen = generator("tenants", seed).choices([*rates], [*rates.values()], k=count)
    return workload(
        poisson(sum(rates.values()), seed),
        lengths,
        count,
        labels=[{"tenant": name} for name in chosen],
    )


def deadlines(
    arrivals: Arrivals,
    count: int,
    share: float = 0.5,
    urgent: float = 2.0,
    patient: float = 60.0,
    seed: int = 0,
) -> list[Job]:
    """A `share` of urgent requests, as short as Alpaca's, among patient ones, as long as
    ShareGPT's.

    extra_args["deadline"] says how many seconds after its arrival an answer must be complete:
    `urgent` or `patient`. extra_args["urgent"] is True or False.
    """
    require_counts(count=count)
    require("share", share, is_number(share, 0, 1), "from 0 to 1")
    require_positive(urgent=urgent, patient=patient)
    rng = generator("deadlines", seed)
    kinds = {True: (alpaca(seed=seed), urgent), False: (sharegpt(seed=seed), patient)}
    chosen = [rng.random() < share for _ in range(count)]
    labels = [{"deadline": kinds[is_urgent][1], "urgent": is_urgent} for is_urgent in chosen]
    return workload(
        arrivals, (next(kinds[is_urgent][0]) for is_urgent in chosen), count, labels=labels
    )


# --- guesses: how many would be right, before each token of an answer ---


def copied(rng: random.Random, count: int) -> Iterator[int]:
    """The answer copies a part of the question, says some words of its own, copies the next part."""
    while count > 0:
        run = min(count, 1 + int(rng.expovariate(1 / 20)))
        yield from (min(MOST_RIGHT, left) for left in range(run, 0, -1))
        own = min(count - run, rng.randrange(1, 6))
        yield from (rng.choice((-1, 0)) for _ in range(own))
        count -= run + own


def invented(rng: random.Random, count: int) -> Iterator[int]:
    """The answer is new: words come again, but seldom with the same ones behind them."""
    for left in range(count, 0, -1):
        yield min(left, rng.choices((-1, 0, 1, 2), (0.3, 0.6, 0.07, 0.03))[0])


# --- workloads out of others ---


def labelled(jobs: list[Job], **extra_args: Any) -> list[Job]:
    """The same jobs, each with these extra_args, too."""
    return [job._replace(extra_args=job.extra_args | extra_args) for job in jobs]


def predicted(jobs: list[Job], sigma: float, seed: int = 0) -> list[Job]:
    """With a guess of the answer's length in extra_args["predicted_tokens"]. Its error is a factor,
    log-normal with median 1: two of three guesses are within a factor of e^`sigma`. With `sigma=0`
    an oracle makes them."""
    require("sigma", sigma, is_number(sigma, 0, 100), "a number from 0 to 100")
    rng = generator("predictions", seed)
    guesses = [max(1, round(job.num_outputs * rng.lognormvariate(0, sigma))) for job in jobs]
    return [
        job._replace(extra_args=job.extra_args | {"predicted_tokens": guess})
        for job, guess in zip(jobs, guesses)
    ]


def merged(*workloads: list[Job]) -> list[Job]:
    """All jobs, sorted by arrival; a conversation stands where its first turn belongs. No two
    workloads share tokens."""
    jobs, starts, top = list[Job](), list[float](), 0  # the largest token id so far
    for begin, workload in zip(itertools.accumulate(map(len, workloads), initial=0), workloads):
        shift = top
        for job in workload:
            after = None if job.after is None else begin + job.after
            # STOP stays
            prompt = tuple((token_id and token_id + shift, n) for token_id, n in job.prompt)
            jobs.append(job._replace(prompt=prompt, answer=job.answer + shift, after=after))
            starts.append(job.time if after is None else starts[after])
            top = max(top, jobs[-1].answer, *(token_id for token_id, _ in prompt))
    order = sorted(range(len(jobs)), key=starts.__getitem__)  # stable: turns stay in order
    place = {old: new for new, old in enumerate(order)}
    return [
        job._replace(after=None if job.after is None else place[job.after])
        for job in map(jobs.__getitem__, order)
    ]
