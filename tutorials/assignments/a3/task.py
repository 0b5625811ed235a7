"""Assignment 3: fairness between tenants. What is served, and what is measured."""

from nanovllm import Job, Run
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import largest_service_gap
from tutorials.simulation.workloads import labelled, lognormal, merged, poisson, workload

# from year to year: another value, and the goals are measured again
SEATS = 24
SLOWER = 1.25  # seconds of the run / those of FCFS: what earns nothing
UNFAIR = 36.0  # a gap in thousand tokens: what earns nothing


def tenant(
    name: str,
    seed: int,
    rate: float,
    prompt: int,
    output: int,
    count: int,
    sigma: float = 0.5,
    start: float = 0.0,
) -> list[Job]:
    """`count` requests from second `start` on, `rate` per second, with these mean lengths in
    tokens; `sigma` says how much they differ."""
    lengths = lognormal(prompt, output, sigma, max_model_len=4096, seed=seed)
    jobs = workload(poisson(rate, seed=seed), lengths, count)
    return labelled([job._replace(time=job.time + start) for job in jobs], tenant=name)


def three_tenants(seed: int) -> list[Job]:
    """Each has more to do than a third of the server: A has many short requests, B long ones, C
    comes later with long prompts."""
    return merged(
        tenant("A", 3 * seed, rate=50, prompt=60, output=60, count=360),
        tenant("B", 3 * seed + 1, rate=25, prompt=300, output=300, count=200),
        tenant("C", 3 * seed + 2, rate=10, prompt=800, output=100, count=90, sigma=0.2, start=4.0),
    )


def gap(run: Run, baseline: Run) -> float:
    return largest_service_gap(run) / 1000


def duration_share(run: Run, baseline: Run) -> float:
    """Counts only if the gap is small: FCFS loses no time."""
    return run.seconds / baseline.seconds if gap(run, baseline) < UNFAIR else SLOWER


TASK = Task(
    "Fairness between tenants: virtual token counters",
    [
        Part(
            "three tenants",
            three_tenants,
            Config(
                model="qwen3-8b",
                num_blocks=1200,
                max_num_seqs=SEATS,
                max_num_batched_tokens=512,
                max_model_len=4096,
            ),
            [
                Goal("largest service gap (1,000 tokens)", gap, none=UNFAIR, full=19, points=50),
                Goal(
                    "seconds of the run / those of FCFS",
                    duration_share,
                    none=SLOWER,
                    full=1.12,
                    points=20,
                ),
            ],
            points=20,
        )
    ],
)
