"""Assignment 8: routing. What is served by a cluster, and what is measured."""

from random import Random
from statistics import mean

from nanovllm import Job, Run
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.report import percentile
from tutorials.simulation.metrics import ttft
from tutorials.simulation.workloads import (
    generator,
    lognormal,
    merged,
    multi_turn,
    workload,
)

# from year to year: another value, and the goals are measured again
SECONDS = 40.0  # in which all questions and first turns come
ENDLESS = 10**9  # turns: a conversation ends when it has as many tokens as it may have


def news(seed: int) -> list[Job]:
    """16 times, a new document of 2,500 tokens becomes hot: within 2 s, 20 ask about it, most of
    them at the start."""
    rng = generator("news", seed)
    times = sorted(2.5 * (i // 20) + 2 * rng.random() ** 2 for i in range(320))
    jobs = workload(times, lognormal(60, 100, 0.5, 600, 4 * seed), 320)
    above = top_token(jobs) + 1
    return [
        job._replace(prompt=((above + i // 20, 2500), *job.prompt)) for i, job in enumerate(jobs)
    ]


def reports(seed: int) -> list[Job]:
    """70 long prompts, of about 7,000 tokens, which no other request shares. Their answers are short."""
    return workload(within(70, 4 * seed + 1), lognormal(7000, 20, 0.3, 16_000, 4 * seed + 1), 70)


def chats(seed: int) -> list[Job]:
    """90 conversations of about three turns."""
    lengths = lognormal(200, 150, 0.6, 1200, 4 * seed + 2)
    return multi_turn(
        within(90, 4 * seed + 2), lengths, 90, ENDLESS, think=2, max_model_len=1300, seed=4 * seed
    )


def agents(seed: int) -> list[Job]:
    """24 programs. Each begins with 3,000 to 12,000 tokens of its own, and asks about nine times,
    soon after the last answer."""
    lengths = lognormal(250, 80, 0.6, 2000, 4 * seed + 3)
    jobs = multi_turn(
        within(24, 4 * seed + 3), lengths, 24, ENDLESS, think=1, max_model_len=3000, seed=seed
    )
    firsts = first_turns(jobs)
    histories = [3000 + 375 * i for i in range(25)]
    generator("histories", seed).shuffle(histories)
    history = dict(zip(dict.fromkeys(firsts), histories))
    above = top_token(jobs) + 1
    return [
        job._replace(prompt=((above + first, history[first]), *job.prompt))
        for job, first in zip(jobs, firsts)
    ]


def cluster_load(seed: int) -> list[Job]:
    """About 900 requests in a minute. Each has a user, and belongs to an application, whose 600
    tokens its prompt begins with. A few users and applications have most of the requests."""
    jobs = merged(news(seed), reports(seed), chats(seed), agents(seed))
    rng = generator("cluster", seed)
    users = zipf(40, len(jobs), rng)
    # all questions about a document belong to the same application
    above = top_token(jobs) + 1
    applications = zipf(8, above, rng)
    return [
        job._replace(
            prompt=((above + applications[job.prompt[0][0]], 600), *job.prompt),
            extra_args={"user": users[first]},
        )
        for job, first in zip(jobs, first_turns(jobs))
    ]


# --- parts of a load ---


def within(count: int, seed: int) -> list[float]:
    """So many times, one in each of as many equal shares: nowhere come many more than elsewhere."""
    rng = generator("within", seed)
    return [SECONDS * (i + rng.random()) / count for i in range(count)]


def zipf(most: int, count: int, rng: Random) -> list[int]:
    """Numbers below `most`: k comes in proportion to 1 / (k + 1)."""
    return rng.choices(range(most), [1 / (k + 1) for k in range(most)], k=count)


def first_turns(jobs: list[Job]) -> list[int]:
    """Of each job: the index of the first turn of its conversation."""
    found: list[int] = []
    for i, job in enumerate(jobs):
        found.append(i if job.after is None else found[job.after])
    return found


def top_token(jobs: list[Job]) -> int:
    return max(max(job.answer, *(token for token, _ in job.prompt)) for job in jobs)


# --- what is measured ---


def mean_ttft(run: Run, baseline: Run) -> float:
    return mean(map(ttft, run.requests))


def late_ttft(run: Run, baseline: Run) -> float:
    """99 of 100 are sooner."""
    return percentile([ttft(served) for served in run.requests], 99)


TASK = Task(
    "Routing: to where its prefix is, unless too many wait there",
    [
        Part(
            "cluster",
            cluster_load,
            Config(
                model="qwen3-8b",
                num_blocks=4000,
                max_num_seqs=8,
                max_num_batched_tokens=2048,
                max_model_len=32_768,
            ),
            [
                Goal("mean TTFT (s)", mean_ttft, none=0.095, full=0.062, points=40),
                Goal("p99 of TTFT (s)", late_ttft, none=0.58, full=0.48, points=30),
            ],
            points=30,
            router="MyRouter",
            replicas=4,
        )
    ],
    engine_points=0,
)
