"""Assignment 7: as many requests as possible within an SLO. What is served, and what is
measured."""

from nanovllm.config import Config
from nanovllm.simulator import Job, Run, Served
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import by_tenant, meets, ttft
from tutorials.simulation.workloads import (
    gamma,
    labelled,
    lognormal,
    merged,
    multi_turn,
    poisson,
    predicted,
    shared_prefix,
    workload,
)

SLO = (1.0, 0.012)  # seconds: to the first token, and per output token after it
GIVEN_UP = 30.0  # seconds until the first token: what earns nothing


def documents(seed: int) -> list[Job]:
    """Questions about 24 documents of 3,000 tokens, in two waves."""
    lengths = lognormal(prompt=100, output=150, sigma=0.6, seed=3 * seed)
    jobs = shared_prefix(
        poisson(14, 3 * seed),
        lengths,
        240,
        num_prefixes=24,
        prefix_tokens=3000,
        skew=1.0,
        seed=seed,
    )
    return [job._replace(time=job.time + 5 + 10 * (i >= 120)) for i, job in enumerate(jobs)]


def chats(seed: int) -> list[Job]:
    """Conversations of three turns on average: each prompt begins with the turns before it."""
    lengths = lognormal(prompt=150, output=200, sigma=0.9, seed=3 * seed + 1)
    return multi_turn(
        poisson(4, 3 * seed + 1), lengths, 100, turns=3, think=3, system_tokens=200, seed=seed
    )


def questions(seed: int) -> list[Job]:
    """Short ones, in bursts."""
    return workload(
        gamma(10, 4, seed), lognormal(prompt=60, output=60, sigma=0.8, seed=3 * seed + 2), 300
    )


def mixture(seed: int) -> list[Job]:
    """About 800 requests, most of them in the first 30 s. Every one has a tenant and a guess of its
    answer's length."""
    jobs = merged(
        labelled(documents(seed), tenant="A"),
        labelled(chats(seed), tenant="B"),
        labelled(questions(seed), tenant="B"),
    )
    return predicted(jobs, sigma=0.4, seed=seed)


def share_within_slo(requests: list[Served]) -> float:
    return sum(meets(request, SLO) for request in requests) / len(requests)


def goodput(run: Run, baseline: Run) -> float:
    """Of all requests. Their number is the same for every scheduler, and so is the time in which
    they come."""
    return share_within_slo(run.requests)


def smaller_goodput(run: Run, baseline: Run) -> float:
    """Of the requests of the tenant who gets less."""
    return min(map(share_within_slo, by_tenant(run.requests).values()))


def longest_ttft(run: Run, baseline: Run) -> float:
    """Counts only if the goodput is clearly better than that of FCFS, which gives nobody up."""
    return max(map(ttft, run.requests)) if goodput(run, baseline) > 0.5 else GIVEN_UP


TASK = Task(
    "Open: the highest goodput",
    [
        Part(
            "mixture",
            mixture,
            Config(
                model="qwen3-8b",
                num_blocks=2500,
                max_num_seqs=24,
                max_num_batched_tokens=2048,
                max_model_len=8192,
            ),
            [
                Goal("goodput (share within the SLO)", goodput, none=0.35, full=0.73, points=40),
                Goal(
                    "goodput of the tenant who gets less",
                    smaller_goodput,
                    none=0.2,
                    full=0.5,
                    points=15,
                ),
                Goal(
                    "longest time to first token (s)",
                    longest_ttft,
                    none=GIVEN_UP,
                    full=16.0,
                    points=15,
                ),
            ],
            points=20,
        )
    ],
)
