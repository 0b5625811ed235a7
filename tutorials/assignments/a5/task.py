"""Assignment 5: shared prefixes. What is served, and what is measured."""

from itertools import pairwise

from nanovllm import Job, Run
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task, mean_latency
from tutorials.simulation.workloads import (
    lognormal,
    merged,
    multi_turn,
    poisson,
    shared_prefix,
    workload,
)

# from year to year: another value, and the goals are measured again
NUM_BLOCKS = 2000
FOUND = 0.85  # of FCFS's prompt tokens: then something was found
NO_SHORTER = 0.95  # of FCFS's longest wait: what earns nothing
NO_SOONER = 0.98  # of FCFS's mean latency, the same


def documents_and_chats(seed: int) -> list[Job]:
    """In about 13 s come 500 questions about 40 documents, 100 requests that share nothing, and the
    first turns of 50 conversations. Memory has room for about 20 documents."""
    questions = lognormal(60, 90, 0.7, 600, seed)
    documents = shared_prefix(
        poisson(40, seed), questions, 500, 40, prefix_tokens=1500, skew=0.3, seed=seed
    )
    singles = workload(poisson(8, seed + 1), lognormal(400, 90, 0.7, 1500, seed + 1), 100)
    turns = lognormal(150, 90, 0.7, 600, seed + 2)
    chats = multi_turn(
        poisson(4, seed + 2),
        turns,
        50,
        turns=3,
        think=1,
        system_tokens=300,
        max_model_len=3000,
        seed=seed,
    )
    return merged(documents, singles, chats)


def prompt_tokens(run: Run) -> int:
    """Tokens that were computed, less those of the outputs, which are the same for all. What was
    computed twice counts twice."""
    outputs = sum(served.job.num_outputs - 1 for served in run.requests)
    return run.num_computed_tokens - outputs


def computed_share(run: Run, baseline: Run) -> float:
    return prompt_tokens(run) / prompt_tokens(baseline)


def latency_share(run: Run, baseline: Run) -> float:
    """Counts only if prefixes were found: smaller steps alone make answers sooner, too."""
    share = mean_latency(run) / mean_latency(baseline)
    return share if computed_share(run, baseline) <= FOUND else max(share, NO_SOONER)


def longest_wait(run: Run) -> float:
    """For a token: from the arrival to the first one, or from one to the next."""
    return max(
        after - before
        for served in run.requests
        for before, after in pairwise([served.arrival, *served.token_times])
    )


def wait_share(run: Run, baseline: Run) -> float:
    """Counts only if prefixes were found, too."""
    if computed_share(run, baseline) > FOUND:
        return NO_SHORTER
    return longest_wait(run) / longest_wait(baseline)


TASK = Task(
    "Shared prefixes: who finds much in the cache comes first, and nobody starves",
    [
        Part(
            "documents and chats",
            documents_and_chats,
            Config(
                model="qwen3-8b",
                num_blocks=NUM_BLOCKS,
                max_num_seqs=24,
                max_num_batched_tokens=1024,
                max_model_len=4096,
            ),
            [
                Goal(
                    "prompt tokens computed / those of FCFS",
                    computed_share,
                    none=0.95,
                    full=0.7,
                    points=25,
                ),
                Goal(
                    "mean latency / that of FCFS",
                    latency_share,
                    none=NO_SOONER,
                    full=0.84,
                    points=10,
                ),
                Goal(
                    "longest wait for a token / that of FCFS",
                    wait_share,
                    none=NO_SHORTER,
                    full=0.8,
                    points=35,
                ),
            ],
            points=20,
        )
    ],
)
