"""Assignment 0: find the bug. What is served, and what is measured."""

from statistics import mean

from nanovllm.config import Config
from nanovllm.simulator import Job, Run
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import ttft
from tutorials.simulation.workloads import all_at_once, lognormal, poisson, shared_prefix, workload

# see README.md
INVARIANTS = ("queues", "references", "budget", "seats", "missing", "writes", "moves")


def little_memory(seed: int) -> list[Job]:
    """Long prompts and answers, so that memory runs out."""
    return workload(poisson(rate=20, seed=seed), lognormal(300, 300, seed=seed), count=300)


def documents(seed: int) -> list[Job]:
    """Questions about eight documents of 512 tokens, which they share."""
    lengths = lognormal(40, 60, sigma=0.5, seed=seed)
    return shared_prefix(
        poisson(rate=15, seed=seed), lengths, count=300, prefix_tokens=512, seed=seed
    )


def many_at_once(seed: int) -> list[Job]:
    return workload(all_at_once(), lognormal(60, 100, sigma=0.5, seed=seed), count=400)


def ttft_share(run: Run, baseline: Run) -> float:
    return mean(map(ttft, run.requests)) / mean(map(ttft, baseline.requests))


def hits_share(run: Run, baseline: Run) -> float:
    return run.num_cached_tokens / baseline.num_cached_tokens


TASK = Task(
    "Find the bug: three invariants",
    [
        Part(
            "A",
            little_memory,
            Config(
                model="qwen3-8b",
                num_blocks=600,
                max_num_seqs=128,
                max_num_batched_tokens=512,
                max_model_len=2048,
            ),
            [
                Goal(
                    "mean time to first token / that of FCFS",
                    ttft_share,
                    none=1.0,
                    full=0.97,
                    points=8,
                )
            ],
            points=15,
            scheduler="SchedulerA",
        ),
        Part(
            "B",
            documents,
            Config(
                model="qwen3-8b",
                num_blocks=600,
                max_num_seqs=64,
                max_num_batched_tokens=512,
                max_model_len=2048,
            ),
            [
                Goal(
                    "tokens from the cache / those of the base class",
                    hits_share,
                    none=0.5,
                    full=0.8,
                    points=8,
                )
            ],
            points=15,
            scheduler="Scheduler",
            block_manager="BlockManagerB",
        ),
        Part(
            "C",
            many_at_once,
            Config(
                model="qwen3-8b",
                num_blocks=4000,
                max_num_seqs=400,
                max_num_batched_tokens=512,
                max_model_len=2048,
            ),
            [],
            points=24,
            scheduler="SchedulerC",
        ),
    ],
    engine_points=0,
    questions={
        "A": "a5eb26794d2e9ed40ab5aecf70a82a8a1003cd5c1cb98047af0341285b972626",
        "B": "07a0b0962107485c3c1375cffa0f2ed9254efe640801713a6c4a358af3d8aa00",
        "C": "0af96a8ed622a394e8b2a239284ee46e9a7a7b0ec38191bbd08571b171118dd6",
    },
    question_points=10,
)
