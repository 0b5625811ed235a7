"""Assignment 2: stall-free batching. What is served, and what is measured."""

from statistics import mean

from nanovllm.config import Config
from nanovllm.simulator import Job, Run
from tutorials.assignments.task import Goal, Part, Task
from tutorials.performance.report import percentile
from tutorials.simulation.metrics import between_tokens, ttft
from tutorials.simulation.workloads import lognormal, merged, poisson, workload

LATE = 30.0  # ms on top of a time between tokens, if first tokens take twice as long as with FCFS


def questions_and_documents(seed: int) -> list[Job]:
    """Per second come 40 questions of about 100 tokens and 9 documents of about 2,500, for 16 s.
    Each answer has about 100."""
    questions = lognormal(prompt=100, output=100, sigma=0.3, seed=seed)
    documents = lognormal(prompt=2500, output=100, sigma=0.3, max_model_len=8192, seed=seed + 1)
    return merged(
        workload(poisson(rate=40, seed=seed), questions, count=640),
        workload(poisson(rate=9, seed=seed + 1), documents, count=144),
    )


def ttft_share(run: Run, baseline: Run) -> float:
    return mean(map(ttft, run.requests)) / mean(map(ttft, baseline.requests))


def surcharge(run: Run, baseline: Run) -> float:
    """In ms: whoever makes steps short at the cost of first tokens has gained less."""
    return LATE * max(0.0, ttft_share(run, baseline) - 1)


def p99_gap(run: Run, baseline: Run) -> float:
    seconds = percentile(sorted(between_tokens(run.requests)), 99)
    return 1e3 * seconds + surcharge(run, baseline)


def longest_gap(run: Run, baseline: Run) -> float:
    return 1e3 * max(between_tokens(run.requests)) + surcharge(run, baseline)


TASK = Task(
    "Stall-free batching: no answer stands still for the sake of a prompt",
    [
        Part(
            "questions and documents",
            questions_and_documents,
            Config(
                model="qwen3-8b",
                num_blocks=12000,
                max_num_seqs=256,
                max_num_batched_tokens=2048,
                max_model_len=8192,
            ),
            [
                Goal(
                    "mean time to first token / that of FCFS",
                    ttft_share,
                    none=1.0,
                    full=0.92,
                    points=34,
                ),
                Goal("time between tokens, p99 (ms)", p99_gap, none=40, full=18, points=18),
                Goal("longest time between tokens (ms)", longest_gap, none=50, full=20, points=18),
            ],
            points=20,
        )
    ],
)
