"""Assignment 7: as many requests as possible within an SLO. What is served, and what is
measured."""

from nanovllm import Job, Run, Served
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import by_tenant, latency, meets
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

# from year to year: another value, and the goals are measured again
SLO = (1.0, 0.014)  # seconds: to the first token, and per output token after it
PATIENCE = 14.0  # seconds: a longer delay of anybody makes all goodput count less
GIVEN_UP = 22.0  # seconds: a delay that earns nothing
TOO_LITTLE = 0.3  # goodput of a tenant that earns nothing


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
    return [job._replace(time=job.time + 5 + 5 * (i >= 120)) for i, job in enumerate(jobs)]


def chats(seed: int) -> list[Job]:
    """Conversations of three turns on average: each prompt begins with the turns before it. As many
    turns with each seed."""
    lengths = lognormal(prompt=150, output=200, sigma=0.6, seed=3 * seed + 1)
    jobs = multi_turn(
        poisson(4, 3 * seed + 1), lengths, 120, turns=3, think=3, system_tokens=200, seed=seed
    )
    return jobs[:260]


def questions(seed: int) -> list[Job]:
    """Short ones, in bursts."""
    return workload(
        gamma(10, 1.5, seed), lognormal(prompt=60, output=60, sigma=0.8, seed=3 * seed + 2), 300
    )


def mixture(seed: int) -> list[Job]:
    """800 requests, most of them in the first 35 s. Every one has a tenant and a guess of its
    answer's length."""
    jobs = merged(
        labelled(documents(seed), tenant="A"),
        labelled(chats(seed), tenant="B"),
        labelled(questions(seed), tenant="B"),
    )
    return predicted(jobs, sigma=0.4, seed=seed)


def share_within_slo(requests: list[Served]) -> float:
    return sum(meets(request, SLO) for request in requests) / len(requests)


def delay(request: Served) -> float:
    """How many seconds later than the SLO allows its last token came. So a request that gets one
    token soon and the others late is late, too."""
    return latency(request) - SLO[0] - SLO[1] * (len(request.token_times) - 1)


def longest_delay(run: Run) -> float:
    return max(map(delay, run.requests))


def goodput(run: Run, baseline: Run) -> float:
    """Of all requests. Their number is the same for every scheduler, and so is the time in which
    they come. It is cut in proportion if a request is given up."""
    return share_within_slo(run.requests) * PATIENCE / max(PATIENCE, longest_delay(run))


def smaller_share(run: Run) -> float:
    """Of the requests of the tenant who gets less."""
    return min(map(share_within_slo, by_tenant(run.requests).values()))


def smaller_goodput(run: Run, baseline: Run) -> float:
    """Counts only if no request is given up: any order that gives up the late ones serves the
    others in time."""
    share = smaller_share(run)
    return share if longest_delay(run) < GIVEN_UP else min(share, TOO_LITTLE)


def worst_delay(run: Run, baseline: Run) -> float:
    """Counts only if both tenants get clearly more than from FCFS, which gives no request up."""
    return longest_delay(run) if smaller_share(run) > TOO_LITTLE else GIVEN_UP


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
                Goal(
                    f"goodput, cut if a delay is above {PATIENCE:g} s",
                    goodput,
                    none=0.45,
                    full=0.62,
                    points=30,
                ),
                Goal(
                    "goodput of the tenant who gets less",
                    smaller_goodput,
                    none=TOO_LITTLE,
                    full=0.43,
                    points=20,
                ),
                Goal("longest delay (s)", worst_delay, none=GIVEN_UP, full=PATIENCE, points=20),
            ],
            points=20,
        )
    ],
)
