"""Assignment 9: speculative decoding. What is served, and what is measured."""

from statistics import mean

from nanovllm import Job, Run, Served
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import latency
from tutorials.simulation.workloads import (
    copied,
    generator,
    invented,
    lognormal,
    merged,
    poisson,
    workload,
)

# from year to year: another value, and the goals are measured again
WRITERS = 300  # in each burst
BURSTS = (4.0, 11.0)  # when writers begin to come ...
SECONDS = 4.0  # ... and for how long
NO_GAIN = 0.8  # of the latency without draft tokens: what earns nothing for editors ...
ALL_PAY = 1.4  # ... and for writers


def editors(seed: int) -> list[Job]:
    """Eight per second. Every second one explains first what it will do, and copies then."""
    rng = generator("editors", seed)
    jobs = workload(poisson(8, seed=2 * seed), lognormal(300, 250, 0.4, 2000, 2 * seed), 160)
    found = []
    for i, job in enumerate(jobs):
        num_new = int(job.num_outputs * rng.uniform(0.1, 0.4)) if i % 2 else 0
        right = [*invented(rng, num_new), *copied(rng, job.num_outputs - num_new)]
        found.append(job._replace(right_draft_tokens=right))
    return found


def writers(seed: int) -> list[Job]:
    """300 within four seconds, twice: new stories for prompts that are as long as those of editors."""
    rng = generator("writers", seed)
    times = sorted(begin + SECONDS * rng.random() for begin in BURSTS for _ in range(WRITERS))
    jobs = workload(times, lognormal(300, 250, 0.4, 2000, 2 * seed + 1), len(times))
    return [job._replace(right_draft_tokens=[*invented(rng, job.num_outputs)]) for job in jobs]


def mixed(seed: int) -> list[Job]:
    return merged(editors(seed), writers(seed))


def copies(served: Served) -> bool:
    """Whether it is an editor."""
    return max(served.job.right_draft_tokens) > 2


def mean_latency(run: Run, of_editors: bool) -> float:
    return mean(latency(served) for served in run.requests if copies(served) == of_editors)


def editors_share(run: Run, baseline: Run) -> float:
    return mean_latency(run, True) / mean_latency(baseline, True)


def writers_share(run: Run, baseline: Run) -> float:
    """Counts only if editors gain: without draft tokens, nobody pays for rejected
    ones."""
    share = mean_latency(run, False) / mean_latency(baseline, False)
    return share if editors_share(run, baseline) < NO_GAIN else max(share, ALL_PAY)


TASK = Task(
    "Draft tokens: for those that copy, and not for those that do not",
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
                    "latency of editors / without draft tokens",
                    editors_share,
                    none=NO_GAIN,
                    full=0.55,
                    points=45,
                ),
                Goal(
                    "latency of writers / without draft tokens",
                    writers_share,
                    none=ALL_PAY,
                    full=1.2,
                    points=25,
                ),
            ],
            points=20,
        )
    ],
)
