"""What an assignment is: workloads, goals and points. The grader, the public tests and the handouts
share it.

from tutorials.assignments.task import load_task, measure

part = load_task("a1").parts[0]
print(measure(part, MyScheduler, seed=1))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any

from nanovllm import Job, RoundRobin, Router, Run, simulate
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.machines import Machine
from tutorials.simulation.metrics import latency

# each folder with a task.py: "a0", "a1", ..., "template"
NAMES = tuple(
    sorted(
        (path.parent.name for path in Path(__file__).parent.glob("*/task.py")),
        key=lambda name: (len(name), name),
    )
)
PUBLIC_SEEDS = (1, 2, 3)


class NotCounted(float):
    """A value that earns nothing. `said` is what was measured, and why that does not count."""

    said: str


def shown(value: float, spec: str) -> str:
    return value.said if isinstance(value, NotCounted) else f"{value:{spec}}"


@dataclass
class Goal:
    """Something to be measured, and what it is worth. A value between `none` and `full` gets a part
    of the points."""

    name: str  # with its unit: "mean latency (s)"
    # of the student's run and of the baseline (`serve_baseline`) on the same workload
    measure: Callable[[Run, Run], float]
    none: float  # no points at this value or a worse one: what the baseline has, or better
    full: float  # full points at this value or a better one
    points: float

    def score(self, value: float) -> float:
        share = (value - self.none) / (self.full - self.none)
        return self.points * min(1.0, max(0.0, share))

    def worst(self, values: list[float]) -> float:
        """That of all seeds which counts."""
        return min(values) if self.full > self.none else max(values)

    @property
    def wanted(self) -> str:
        return f"full points at {self.full:g}, none at {self.none:g}"

    def sentence(self, value: float, count: int) -> str:
        """What a report says of the worst of so many values."""
        return f"{shown(value, '.4g')}, the worst of {count}; {self.wanted}"


@dataclass
class Part:
    """Workloads for one class of the student's file, and what is measured on them. The worst of all
    seeds counts."""

    name: str
    workload: Callable[[int], Sequence[Job]]  # of a seed
    config: Config
    goals: list[Goal]
    points: float  # for the rules: each request is answered, no block lost, no budget exceeded
    hardware: str | Machine = "h100"
    scheduler: str = "MyScheduler"  # names of classes in the student's file
    block_manager: str | None = None
    # instead of a scheduler: a class for which of the `replicas` serves a request. They have
    # schedulers of ours
    router: str | None = None
    replicas: int = 1
    num_seeds: int = 3
    keep_steps: bool = False  # whether a goal looks at `Run.steps`
    # what else is checked of a block manager, on a seed: raises AssertionError
    check_manager: Callable[["Part", type[BlockManager], int], None] | None = None

    @property
    def policy(self) -> tuple[str, type]:
        """The name of the class that decides, and what it is a subclass of."""
        if self.router is not None:
            return self.router, Router
        return self.scheduler, Scheduler

    @property
    def baseline(self) -> str:
        """What a student's policy is compared with."""
        return "FCFS" if self.router is None else "RoundRobin"


def name_in_report(part: Part, goal: Goal) -> str:
    return f"{part.name}, {goal.name}"


@dataclass
class Task:
    """One assignment."""

    title: str
    parts: list[Part]
    engine_points: float = 10  # for the same answers as any other schedule in the real engine
    # name -> what is wrong with an answer, which is what JSON can hold; None: it is right
    questions: dict[str, Callable[[Any], str | None]] = field(default_factory=dict)
    question_points: float = 0  # for each

    @property
    def goals(self) -> dict[str, Goal]:
        """By their names in a report."""
        return {name_in_report(part, goal): goal for part in self.parts for goal in part.goals}

    @property
    def points(self) -> float:
        parts = sum(part.points + sum(goal.points for goal in part.goals) for part in self.parts)
        return parts + self.engine_points + self.question_points * len(self.questions)


def load_task(name: str) -> Task:
    if name not in NAMES:
        raise ValueError(
            f"assignment={name!r} is not allowed: it must be one of {', '.join(NAMES)}"
        )
    return import_module(f"tutorials.assignments.{name}.task").TASK


def measure(part: Part, policy_cls: type, seed: int) -> dict[str, float]:
    """The value of each goal, for a scheduler or a router in this process. Raises ScheduleError if
    it breaks a rule."""
    run, baseline = serve(part, policy_cls, seed), serve_baseline(part, seed)
    return {goal.name: goal.measure(run, baseline) for goal in part.goals}


def serve(
    part: Part,
    policy_cls: type,
    seed: int,
    manager_cls: type[BlockManager] | None = None,
    check: bool = True,
) -> Run:
    """With `check`, each step is looked at; that takes longer than the run itself."""
    kind = "scheduler_cls" if part.router is None else "router_cls"
    return simulate(
        part.workload(seed),
        replace(part.config, block_manager_cls=manager_cls),
        part.hardware,
        check=check,
        keep_steps=part.keep_steps,
        replicas=part.replicas,
        **{kind: policy_cls},
    )


def serve_baseline(part: Part, seed: int) -> Run:
    """First come, first served, without draft tokens; on several replicas, one after the other."""
    policy_cls = Scheduler if part.router is None else RoundRobin
    silent = replace(part, config=replace(part.config, speculative_config=None))
    return serve(silent, policy_cls, seed, check=False)


def mean_latency(run: Run) -> float:
    """Seconds from arrival to the last token, of a run in which all requests are finished."""
    return mean(map(latency, run.requests))
