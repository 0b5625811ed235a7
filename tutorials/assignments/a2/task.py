"""Assignment 2: stall-free batching. What is served, and what is measured."""

from statistics import mean

from nanovllm.config import Config
from nanovllm.simulator import Job, Run
from tutorials.assignments.task import Goal, Part, Task
from tutorials.performance.report import percentile
from tutorials.simulation.metrics import between_tokens, ttft
from tutorials.simulation.workloads import gamma, lognormal, workload


def questions_and_documents(seed: int) -> list[Job]:
    """600 requests in bursts, 30 per second. Most prompts are short, the longest have some thousand
    tokens."""
    lengths = lognormal(prompt=600, output=200, sigma=1.2, max_model_len=8192, seed=seed)
    return workload(gamma(rate=30, cv=3, seed=seed), lengths, count=600)


def gaps(run: Run) -> list[float]:
    return sorted(between_tokens(run.requests))


def ttft_share(run: Run, baseline: Run) -> float:
    return mean(map(ttft, run.requests)) / mean(map(ttft, baseline.requests))


def p99_gap(run: Run, baseline: Run) -> float:
    return 1e3 * percentile(gaps(run), 99)


def longest_gap(run: Run, baseline: Run) -> float:
    return 1e3 * gaps(run)[-1]


TASK = Task(
    "Stall-free batching: no answer stands still for the sake of a prompt",
    [
        Part(
            "questions and documents",
            questions_and_documents,
            Config(
                model="qwen3-8b",
                num_blocks=4900,
                max_num_seqs=256,
                max_num_batched_tokens=2048,
                max_model_len=8192,
            ),
            [
                Goal(
                    "mean time to first token / that of FCFS",
                    ttft_share,
                    none=1.0,
                    full=0.75,
                    points=30,
                ),
                Goal("time between tokens, p99 (ms)", p99_gap, none=40, full=18, points=20),
                Goal("longest time between tokens (ms)", longest_gap, none=50, full=20, points=20),
            ],
            points=20,
        )
    ],
)
