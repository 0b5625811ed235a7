"""Assignment 6: deadlines. What is served, and what is measured."""

from collections.abc import Callable

from nanovllm.config import Config
from nanovllm.simulator import Job, Run, Served
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import latency, meets_deadline
from tutorials.simulation.workloads import (
    gamma,
    generator,
    labelled,
    lognormal,
    merged,
    poisson,
    predicted,
    workload,
)


def overload(seed: int) -> list[Job]:
    """For 15 seconds, more than twice as many patient requests as the machine can serve, and bursts
    of urgent ones."""
    urgent = workload(gamma(10, 3, seed), lognormal(60, 30, 0.5, 160, seed), 150)
    rng = generator("patience", seed)
    labels = ({"deadline": rng.uniform(3, 10), "urgent": False} for _ in range(400))
    patient = workload(
        poisson(27, seed), lognormal(200, 300, 0.8, 1200, seed + 1000), 400, labels=labels
    )
    return predicted(
        merged(labelled(urgent, deadline=0.6, urgent=True), patient), sigma=0.3, seed=seed
    )


def is_urgent(served: Served) -> bool:
    return served.job.extra_args["urgent"]


def is_patient(served: Served) -> bool:
    return not is_urgent(served)


def is_long(served: Served) -> bool:
    return is_patient(served) and served.job.num_outputs > 300


def missed(which: Callable[[Served], bool]) -> Callable[[Run, Run], float]:
    """How many of these requests miss their deadline, divided by how many do under FCFS."""

    def count(run: Run) -> int:
        return sum(which(served) and not meets_deadline(served) for served in run.requests)

    return lambda run, baseline: count(run) / count(baseline)


def worst_latency(run: Run, baseline: Run) -> float:
    """The longest time from the arrival of a patient request to its last token, divided by that of
    FCFS."""
    worst = max(map(latency, filter(is_patient, run.requests)))
    worst_under_fcfs = max(map(latency, filter(is_patient, baseline.requests)))
    return worst / worst_under_fcfs


TASK = Task(
    "Deadlines: the earliest first, and nothing for those who are lost",
    [
        Part(
            "overload",
            overload,
            Config(
                model="qwen3-8b",
                num_blocks=2000,
                max_num_seqs=32,
                max_num_batched_tokens=1024,
                max_model_len=2048,
            ),
            [
                Goal(
                    "missed urgent deadlines / those of FCFS",
                    missed(is_urgent),
                    none=0.6,
                    full=0.13,
                    points=25,
                ),
                Goal(
                    "missed patient deadlines / those of FCFS",
                    missed(is_patient),
                    none=0.6,
                    full=0.38,
                    points=25,
                ),
                Goal("the same for long answers", missed(is_long), none=1.0, full=0.9, points=10),
                Goal(
                    "longest latency of patient ones / that of FCFS",
                    worst_latency,
                    none=2.6,
                    full=2.1,
                    points=5,
                ),
            ],
            points=25,
        )
    ],
)
