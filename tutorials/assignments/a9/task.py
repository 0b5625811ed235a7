"""Assignment 9: guesses. What is served, and what is measured."""

from collections.abc import Iterator
from random import Random
from statistics import mean

from nanovllm.config import Config
from nanovllm.simulator import Job, Run
from nanovllm.simulator.jobs import Served
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import latency
from tutorials.simulation.workloads import generator, lognormal, merged, poisson, workload

MOST_RIGHT = 16  # guesses in a row
BURSTS = (4.0, 11.0)  # when writers begin to come ...
SECONDS = 4.0  # ... and for how long
GUESSES_ARE_GONE = 0.85  # of the editors' latency: what earns nothing for writers


def edited(rng: Random, count: int) -> Iterator[int]:
    """Right guesses before each token of an answer that copies: a part of the question, some words
    of its own, the next part."""
    while count > 0:
        run = min(count, 1 + int(rng.expovariate(1 / 20)))
        yield from (min(MOST_RIGHT, left) for left in range(run, 0, -1))
        own = min(count - run, rng.randrange(1, 6))
        yield from (rng.choice((-1, 0)) for _ in range(own))
        count -= run + own


def told(rng: Random, count: int) -> Iterator[int]:
    """The same of an answer that is new: some of its words come again, but seldom with the same
    ones behind them."""
    for left in range(count, 0, -1):
        yield min(left, rng.choices((-1, 0, 1, 2), (0.3, 0.6, 0.07, 0.03))[0])


def editors(seed: int) -> list[Job]:
    """Eight per second. Every second one explains first what it will do, and copies then."""
    rng = generator("editors", seed)
    jobs = workload(poisson(8, seed=2 * seed), lognormal(300, 250, 0.4, 2000, 2 * seed), 160)
    found = []
    for i, job in enumerate(jobs):
        num_told = int(job.num_outputs * rng.uniform(0.1, 0.4)) if i % 2 else 0
        right = [*told(rng, num_told), *edited(rng, job.num_outputs - num_told)]
        found.append(job._replace(right_guesses=right))
    return found


def writers(seed: int) -> list[Job]:
    """200 within four seconds, twice: new stories for prompts that are as long as those of editors."""
    rng = generator("writers", seed)
    times = sorted(begin + SECONDS * rng.random() for begin in BURSTS for _ in range(200))
    jobs = workload(times, lognormal(300, 250, 0.4, 2000, 2 * seed + 1), len(times))
    return [job._replace(right_guesses=[*told(rng, job.num_outputs)]) for job in jobs]


def mixed(seed: int) -> list[Job]:
    return merged(editors(seed), writers(seed))


def copies(served: Served) -> bool:
    """Whether it is an editor."""
    return max(served.job.right_guesses) > 2


def mean_latency(run: Run, of_editors: bool) -> float:
    return mean(latency(served) for served in run.requests if copies(served) == of_editors)


def editors_share(run: Run, baseline: Run) -> float:
    return mean_latency(run, True) / mean_latency(baseline, True)


def writers_share(run: Run, baseline: Run) -> float:
    """Counts only if editors gain, too: a scheduler without guesses has none that are wrong."""
    if editors_share(run, baseline) > GUESSES_ARE_GONE:
        return 1.0
    return mean_latency(run, False) / mean_latency(baseline, False)


TASK = Task(
    "Guesses: for those that copy, and not for those that do not",
    [
        Part(
            "mixed",
            mixed,
            Config(
                model="qwen3-8b",
                num_blocks=20_000,
                max_num_seqs=512,
                max_num_batched_tokens=2048,
                max_model_len=4096,
                speculative_config={"num_speculative_tokens": 4},
            ),
            [
                Goal(
                    "latency of editors / with four guesses for all",
                    editors_share,
                    none=0.7,
                    full=0.52,
                    points=45,
                ),
                Goal(
                    "latency of writers / with four guesses for all",
                    writers_share,
                    none=0.7,
                    full=0.56,
                    points=25,
                ),
            ],
            points=20,
        )
    ],
)
