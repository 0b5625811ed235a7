"""Assignment 1: head-of-line blocking. What is served, and what is measured."""

from nanovllm.config import Config
from nanovllm.simulator import Job, Run
from tutorials.assignments.task import Goal, Part, Task, mean_latency
from tutorials.simulation.metrics import ttft
from tutorials.simulation.workloads import lognormal, poisson, predicted, workload

STARVED = 28.0  # seconds until the first token: what earns nothing


def chats(seed: int) -> list[Job]:
    """800 requests in about 27 s, half as many again as 16 seats can serve, each with a guess of
    its answer's length."""
    lengths = lognormal(prompt=120, output=120, sigma=1.0, seed=seed)
    return predicted(
        workload(poisson(rate=30, seed=seed), lengths, count=800), sigma=0.5, seed=seed
    )


def latency_share(run: Run, baseline: Run) -> float:
    return mean_latency(run) / mean_latency(baseline)


def worst_ttft(run: Run, baseline: Run) -> float:
    """Counts only if the mean latency is shorter than that of FCFS, which starves nobody."""
    return max(map(ttft, run.requests)) if latency_share(run, baseline) < 0.9 else STARVED


TASK = Task(
    "Head-of-line blocking: shortest job first, and nobody starves",
    [
        Part(
            "chats",
            chats,
            Config(
                model="qwen3-8b",
                num_blocks=1000,
                max_num_seqs=16,
                max_num_batched_tokens=512,
                max_model_len=2048,
            ),
            [
                Goal("mean latency / that of FCFS", latency_share, none=0.95, full=0.55, points=40),
                Goal(
                    "longest time to first token (s)",
                    worst_ttft,
                    none=STARVED,
                    full=20.0,
                    points=30,
                ),
            ],
            points=20,
        )
    ],
)
