"""Workloads of the simulator: arrivals and lengths are as promised, what is shared is shared, and
nothing else is.

Run: pytest tests/simulator/test_workloads.py [-k merged]
"""

import math
from itertools import islice, pairwise
from statistics import mean, median, stdev

import pytest

from nanovllm.topics.simulator.simulation import STOP
from tutorials.simulation.workloads import (
    all_at_once,
    alpaca,
    azure,
    deadlines,
    fixed,
    gamma,
    labelled,
    lognormal,
    merged,
    multi_turn,
    poisson,
    predicted,
    shared_prefix,
    sharegpt,
    tenants,
    workload,
)


def tokens(runs):
    return [token_id for token_id, count in runs for _ in range(count)]


def common(a, b):
    """How many tokens two prompts share."""
    pairs = zip(tokens(a.prompt), tokens(b.prompt))
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y),
        min(a.num_prompt_tokens, b.num_prompt_tokens),
    )


def check_jobs(jobs):
    """What every workload promises."""
    starts = [job.time for job in jobs if job.after is None]
    assert starts == sorted(starts) and all(job.time >= 0 for job in jobs)
    assert all(job.after is None or 0 <= job.after < i for i, job in enumerate(jobs))
    own = [job.prompt[-1][0] for job in jobs] + [job.answer for job in jobs]
    assert len(set(own)) == len(own) and STOP not in own
    assert all(token_id >= STOP and count >= 0 for job in jobs for token_id, count in job.prompt)
    assert all(1 <= job.num_outputs <= job.max_tokens for job in jobs)


# --- arrivals and lengths ---


@pytest.mark.parametrize(
    "arrivals, cv",
    [(poisson(4), 1), (gamma(4, cv=1), 1), (gamma(4, cv=3), 3), (gamma(4, cv=0.2), 0.2)],
)
def test_arrivals_have_their_rate_and_their_bursts(arrivals, cv):
    times = [0.0, *islice(arrivals, 10_000)]
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.06)


@pytest.mark.parametrize(
    "lengths, means",
    [
        (sharegpt(), (161.31, 337.99)),
        (alpaca(), (19.31, 58.45)),
        (lognormal(50, 10, sigma=0.3), (50, 10)),
    ],
)
def test_lengths_have_their_means(lengths, means):
    """What is longer than a sequence may be is drawn again: about a tenth is missing."""
    pairs = list(islice(lengths, 5000))
    for column, expected in zip(zip(*pairs), means):
        assert 0.85 * expected < mean(column) < 1.05 * expected and min(column) >= 1
    assert max(map(sum, pairs)) <= 2048


# --- workloads ---


def everything(seed):
    return {
        "workload": workload(poisson(3, seed), sharegpt(seed=seed), 50),
        "bursts": workload(gamma(3, 4, seed), alpaca(seed=seed), 50),
        "multi_turn": multi_turn(
            poisson(1, seed), alpaca(seed=seed), 20, system_tokens=30, seed=seed
        ),
        "shared_prefix": shared_prefix(poisson(3, seed), alpaca(seed=seed), 50, seed=seed),
        "tenants": tenants({"a": 1, "b": 4}, alpaca(seed=seed), 50, seed=seed),
        "deadlines": deadlines(poisson(3, seed), 50, seed=seed),
        "predicted": predicted(
            workload(poisson(3, seed), alpaca(seed=seed), 50), sigma=0.5, seed=seed
        ),
    }


def test_a_seed_decides_everything():
    assert everything(1) == everything(1)
    for (name, jobs), others in zip(everything(1).items(), everything(2).values()):
        assert jobs != others, name
        check_jobs(jobs)


def test_multi_turn_continues_what_was_said():
    jobs = multi_turn(
        poisson(1), fixed(10, 5), 300, turns=4, think=3, system_tokens=32, max_model_len=200
    )
    check_jobs(jobs)
    thoughts = []
    for job in jobs:
        assert tokens(job.prompt)[:32] == [1] * 32
        if job.after is not None:
            before = jobs[job.after]
            assert tokens(job.prompt)[:-10] == tokens(before.prompt) + [before.answer] * 4 + [STOP]
            thoughts.append(job.time)
    assert mean(thoughts) == pytest.approx(3, rel=0.15)
    assert common(jobs[0], next(job for job in jobs[1:] if job.after is None)) == 32
    followed = {job.after for job in jobs if job.after is not None}
    assert len(followed) == len(thoughts)  # one next turn at most
    assert max(job.num_prompt_tokens + job.num_outputs for job in jobs) <= 200
    many = multi_turn(poisson(1), fixed(10, 5), 2000, turns=4)
    assert len(many) / 2000 == pytest.approx(4, rel=0.1)
    alone = multi_turn(poisson(1), fixed(10, 5), 20, turns=1)
    assert len(alone) == 20 and common(*alone[:2]) == 0 and len(alone[0].prompt) == 1
    assert [job.time for job in multi_turn([2.0, 1.0], fixed(10, 5), 2, turns=1)] == [1, 2]


def test_prefixes_are_shared_and_some_more_than_others():
    jobs = shared_prefix(poisson(1), fixed(7, 3), 3000, num_prefixes=4, prefix_tokens=100, skew=1.0)
    check_jobs(jobs)
    first = [job.prompt[0][0] for job in jobs]
    assert not set(first) & {
        token_id for job in jobs for token_id in (job.prompt[1][0], job.answer)
    }
    counts = [first.count(token_id) for token_id in sorted(set(first))]
    zipf = [1 / k / sum(1 / i for i in range(1, 5)) for k in range(1, 5)]
    assert [count / 3000 for count in counts] == pytest.approx(zipf, abs=0.03)
    for a, b in pairwise(jobs[:50]):
        assert a.num_prompt_tokens == 107
        assert common(a, b) == (100 if a.prompt[0] == b.prompt[0] else 0)
    equal = shared_prefix(poisson(1), fixed(7, 3), 3000, num_prefixes=2, skew=0)
    assert mean(job.prompt[0] == equal[0].prompt[0] for job in equal) == pytest.approx(
        0.5, abs=0.03
    )


def test_tenants_have_their_rates():
    jobs = tenants({"a": 1, "b": 3}, fixed(5, 5), 4000)
    check_jobs(jobs)
    names = [job.extra_args["tenant"] for job in jobs]
    for name, rate in (("a", 1), ("b", 3)):
        assert names.count(name) / jobs[-1].time == pytest.approx(rate, rel=0.1)


def test_urgent_requests_are_short():
    jobs = deadlines(poisson(1), 2000, share=0.25, urgent=1.5, patient=30)
    check_jobs(jobs)
    urgent = [job for job in jobs if job.extra_args["urgent"] is True]
    patient = [job for job in jobs if job.extra_args["urgent"] is False]
    assert len(urgent) / 2000 == pytest.approx(0.25, abs=0.03)
    assert {job.extra_args["deadline"] for job in urgent} == {1.5}
    assert {job.extra_args["deadline"] for job in patient} == {30}
    assert mean(job.num_outputs for job in urgent) < mean(job.num_outputs for job in patient) / 3


# --- a recorded trace ---


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [
        "15:46.6805900,374,44",
        "15:50.6805900,396,109",
        "15:51.6805900,7,0",
        "16:16.6805900,9,9",
    ]
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:{row}\n" for row in rows)
    )
    return path


def test_a_trace_keeps_its_times_or_gets_a_rate(trace):
    jobs = azure(trace)
    check_jobs(jobs)
    assert [job.time for job in jobs] == pytest.approx([0, 4, 5, 30])
    assert [(job.num_prompt_tokens, job.num_outputs) for job in jobs] == [
        (374, 44),
        (396, 109),
        (7, 1),
        (9, 9),
    ]
    assert [job.time for job in azure(str(trace), count=3)] == pytest.approx([0, 4, 5])
    assert [job.time for job in azure(trace, rate=0.5)] == pytest.approx([0, 0.8, 1, 6])
    assert [job.time for job in azure(trace, count=1)] == [0]


# --- workloads out of others ---


def test_predictions():
    jobs = workload(all_at_once(), sharegpt(), 2000)
    assert all(
        job.extra_args == {"predicted_tokens": job.num_outputs} for job in predicted(jobs, sigma=0)
    )
    errors = [
        math.log(job.extra_args["predicted_tokens"] / job.num_outputs)
        for job in predicted(labelled(jobs, tenant="a"), sigma=0.5)
        if job.num_outputs > 100
    ]
    assert median(errors) == pytest.approx(0, abs=0.05) and stdev(errors) == pytest.approx(
        0.5, rel=0.08
    )
    assert all(not job.extra_args for job in jobs)  # the old ones are as they were


def test_merged_keeps_conversations_and_what_they_share():
    parts = [jobs for seed in (1, 2) for jobs in everything(seed).values()]
    jobs = merged(*parts)
    check_jobs(jobs)
    assert len(jobs) == sum(map(len, parts))
    for job in jobs:
        if job.after is not None:
            before = jobs[job.after]
            assert tokens(job.prompt)[: before.num_prompt_tokens + before.num_outputs] == tokens(
                before.conversation
            )
    first = {job.prompt[0][0] for job in jobs}
    assert len(first) == sum(len({job.prompt[0][0] for job in part}) for part in parts)


# --- wrong arguments ---


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: poisson(0), "rate=0: a positive number"),
        (lambda: poisson(1, seed=-1), "seed=-1: an integer, 0 or more"),
        (lambda: fixed(1, 2.0), "output=2.0 is not allowed"),
        (lambda: sharegpt(max_model_len=100), "max_model_len=100: an integer, at least"),
        (lambda: workload([0, 1], alpaca(), 3), "arrivals=.*: 3 items or more"),
        (lambda: workload([1, 0], alpaca(), 2), "arrivals=.*: in order"),
        (lambda: azure("none.csv"), "none.csv is not a CSV"),
        (lambda: multi_turn(poisson(1), alpaca(), 2, turns=0.5), "turns=0.5 is not allowed"),
        (
            lambda: multi_turn(poisson(1), fixed(9, 9), 2, max_model_len=17),
            "max_model_len=17 .* at least 18",
        ),
        (lambda: deadlines(poisson(1), 2, share=2), "share=2: from 0 to 1"),
        (lambda: predicted([], sigma=-0.1), "sigma=-0.1: a number from 0 to 100"),
    ],
)
def test_errors_name_the_argument_the_value_and_what_is_allowed(build, message):
    with pytest.raises(ValueError, match=message.replace(": ", " is not allowed: it must be ")):
        build()
