"""Assignment template: work that can wait. What is served, and what is measured."""

from statistics import mean

from nanovllm import Job, Run, Served
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import ttft
from tutorials.simulation.workloads import labelled, lognormal, merged, poisson, workload

# from year to year: another value, and the goals are measured again
SEATS = 8
TOO_LONG = 2.2  # times the longest wait under FCFS: what earns nothing


def stream(seed: int, rate: float, count: int) -> list[Job]:
    return workload(poisson(rate, seed), lognormal(60, 30, 0.7, 600, seed), count)


def people_and_batch(seed: int) -> list[Job]:
    """In about 7 s come 150 requests of people and 220 of a batch job, half as many again as 8
    seats can serve."""
    people = stream(2 * seed, rate=24, count=150)
    batch = stream(2 * seed + 1, rate=36, count=220)
    return merged(labelled(people, batch=False), labelled(batch, batch=True))


def is_of_people(served: Served) -> bool:
    return not served.job.extra_args["batch"]


def people_share(run: Run, baseline: Run) -> float:
    waits = [mean(map(ttft, filter(is_of_people, r.requests))) for r in (run, baseline)]
    return waits[0] / waits[1]


def longest_share(run: Run, baseline: Run) -> float:
    """Counts only if people wait for half as long as under FCFS, which lets no request wait for much
    longer than others."""
    longest = [max(map(ttft, r.requests)) for r in (run, baseline)]
    return longest[0] / longest[1] if people_share(run, baseline) < 0.5 else TOO_LONG


TASK = Task(
    "Work that can wait: people first, and the batch job pays a fair price",
    [
        Part(
            "people and a batch job",
            people_and_batch,
            Config(
                model="qwen3-8b",
                num_blocks=400,
                max_num_seqs=SEATS,
                max_num_batched_tokens=512,
                max_model_len=2048,
            ),
            [
                Goal(
                    "mean wait of people / that under FCFS",
                    people_share,
                    none=0.7,
                    full=0.15,
                    points=40,
                ),
                Goal(
                    "longest wait of all / that under FCFS",
                    longest_share,
                    none=TOO_LONG,
                    full=1.85,
                    points=30,
                ),
            ],
            points=20,
        )
    ],
)
