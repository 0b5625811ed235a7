"""Assignment 4: preemption. What is served, and what is measured."""

from nanovllm.config import Config
from nanovllm.roofline import HARDWARE
from nanovllm.simulator import Job, Machine, Run
from tutorials.assignments.task import Goal, Part, Task, mean_latency
from tutorials.simulation.metrics import tokens_needed
from tutorials.simulation.workloads import lognormal, merged, poisson, shared_prefix, workload

MACHINE = Machine(HARDWARE["h100"], host_bytes_per_second=25e9)
SECONDS_PER_TOKEN = 27e-6  # to compute it again: 16 GFLOP at 60 % of 989 TFLOP/s
SECONDS_PER_BLOCK = 190e-6  # to swap it out and in: twice 16 tokens of 147,456 bytes at 25 GB/s
SLOW = 1.1  # times the mean latency of FCFS


def growing(seed: int) -> list[Job]:
    """Within 2 s come 200 requests with short prompts and long answers, 30 with long prompts, and
    120 questions about three documents. All answers grow together, until the memory is full."""
    stories = workload(poisson(100, seed), lognormal(30, 600, 0.4, 1800, seed), 200)
    articles = workload(poisson(15, seed + 1), lognormal(1800, 200, 0.4, 4500, seed + 1), 30)
    questions = lognormal(60, 500, 0.4, 1500, seed + 2)
    documents = shared_prefix(
        poisson(60, seed + 2), questions, 120, 3, prefix_tokens=1600, skew=0.3, seed=seed
    )
    return merged(stories, articles, documents)


def seconds_lost(run: Run) -> float:
    """What preemption has cost: tokens that were computed again, and blocks that were swapped."""
    computed_again = max(0, run.num_computed_tokens - sum(map(tokens_needed, run.requests)))
    return SECONDS_PER_TOKEN * computed_again + SECONDS_PER_BLOCK * run.num_swapped_blocks


def lost_share(run: Run, baseline: Run) -> float:
    """Counts only if the mean latency is about that of FCFS: who runs one request at a time
    preempts nobody."""
    is_slow = mean_latency(run) > SLOW * mean_latency(baseline)
    return 1.0 if is_slow else seconds_lost(run) / seconds_lost(baseline)


TASK = Task(
    "Preemption: who, how, and how to need less of it",
    [
        Part(
            "growing answers",
            growing,
            Config(
                model="qwen3-8b",
                num_blocks=1500,
                max_num_seqs=256,
                max_num_batched_tokens=512,
                max_model_len=6000,
                preemption_mode="swap",
                swap_gib=1.0,
            ),
            [
                Goal(
                    "time lost to preemption / that of FCFS",
                    lost_share,
                    none=0.75,
                    full=0.3,
                    points=70,
                )
            ],
            points=20,
            hardware=MACHINE,
        )
    ],
)
