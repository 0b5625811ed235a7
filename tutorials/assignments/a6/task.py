"""Assignment 6: deadlines. What is served, and what is measured."""

from nanovllm import Job, Run, Served
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.simulation.metrics import latency, meets_deadline
from tutorials.simulation.workloads import (
    generator,
    labelled,
    lognormal,
    merged,
    poisson,
    predicted,
    workload,
)

# from year to year: another value, and the goals are measured again
SEATS = 12
ALL_LATE = 1.0  # what earns nothing
AS_LATE = 0.87  # of FCFS's late tokens: the same
FOR_EVER = 4.2  # times FCFS's longest latency: what earns nothing


def overload(seed: int) -> list[Job]:
    """For 16 seconds, half as much again as 12 seats can serve: patient requests, and in each
    second 8 urgent ones at once. The prompts of both are alike."""
    rng = generator("bursts", seed)
    bursts = sorted([second + rng.random() for second in range(16)] * 8)
    urgent = workload(bursts, lognormal(100, 75, 0.25, 200, seed), len(bursts))
    rng = generator("patience", seed)
    labels = ({"deadline": rng.uniform(4, 10), "urgent": False} for _ in range(245))
    patient = workload(
        poisson(15, seed), lognormal(100, 150, 0.6, 1000, seed + 1000), 245, labels=labels
    )
    return predicted(
        merged(labelled(urgent, deadline=0.85, urgent=True), patient), sigma=0.2, seed=seed
    )


def is_urgent(served: Served) -> bool:
    return served.job.extra_args["urgent"]


def is_patient(served: Served) -> bool:
    return not is_urgent(served)


def num_missed(run: Run) -> int:
    """Urgent deadlines."""
    return sum(is_urgent(served) and not meets_deadline(served) for served in run.requests)


def late_tokens(run: Run) -> int:
    """All tokens of patient answers that miss their deadline: a long answer counts more."""
    late = (s for s in run.requests if is_patient(s) and not meets_deadline(s))
    return sum(served.job.num_outputs for served in late)


def missed_share(run: Run, baseline: Run) -> float:
    return num_missed(run) / num_missed(baseline)


def late_share(run: Run, baseline: Run) -> float:
    """Counts only if clearly fewer urgent deadlines are missed than under FCFS: a scheduler that
    gives up the urgent ones has time for the others."""
    if missed_share(run, baseline) > 0.55:
        return ALL_LATE
    return late_tokens(run) / late_tokens(baseline)


def worst_latency(run: Run, baseline: Run) -> float:
    """The longest time from the arrival of a patient request to its last token, divided by that of
    FCFS. Counts only if fewer tokens are late: FCFS itself lets nobody wait forever."""
    worst = max(map(latency, filter(is_patient, run.requests)))
    worst_under_fcfs = max(map(latency, filter(is_patient, baseline.requests)))
    share = worst / worst_under_fcfs
    return share if late_share(run, baseline) < AS_LATE else max(share, FOR_EVER)


TASK = Task(
    "Deadlines: the earliest first, and nothing for those who are lost",
    [
        Part(
            "overload",
            overload,
            Config(
                model="qwen3-8b",
                num_blocks=2000,
                max_num_seqs=SEATS,
                max_num_batched_tokens=1024,
                max_model_len=2048,
            ),
            [
                Goal(
                    "missed urgent deadlines / those of FCFS",
                    missed_share,
                    none=0.65,
                    full=0.13,
                    points=22,
                ),
                Goal(
                    "late patient tokens / those of FCFS",
                    late_share,
                    none=AS_LATE,
                    full=0.82,
                    points=38,
                ),
                Goal(
                    "longest latency of patient ones / that of FCFS",
                    worst_latency,
                    none=FOR_EVER,
                    full=3.4,
                    points=5,
                ),
            ],
            points=25,
        )
    ],
)
