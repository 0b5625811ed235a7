"""Checks of chapter 16: whole prompts, seats by weight, a seat that stays free."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nanovllm import Job, Run, SamplingParams, simulate
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config, Limits
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.simulator.cost_model import HARDWARE
from nanovllm.topics.simulator.machines import Machine
from tutorials.exercises.checks.expect import expect, expect_linear


class OneSecond(Machine):
    """Each step takes a second, so that times are numbers of steps."""

    def seconds(self, *step, **parts) -> float:
        return 1.0


@dataclass
class Step:
    """What a step has done, and what it has left. Jobs are given by their indices."""

    name: str
    items: list[tuple[int, int, bool]]  # (job, tokens, whether of its prompt)
    before: list[int]  # that run already
    running: list[int]  # after the plan
    waiting: list[int]  # after the plan
    room: int  # tokens that are left
    prompt_room: int

    @property
    def admitted(self) -> list[int]:
        return [i for i in self.running if i not in self.before]


def new_job(i: int, arrives: int, prompt: int, answer: int, **said: object) -> Job:
    return Job(float(arrives), ((2 * i + 1, prompt),), answer, 2 * i + 2, 200, said)


def steps_of(
    jobs: list[Job], scheduler_cls: type[Scheduler], seats: int, budget: int, bound: int
) -> list[Step]:
    """The steps of a run with plenty of memory, in which no job may lose its seat."""
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
    config = Config(model="qwen3-0.6b", num_blocks=2000, block_size=4, **limits)
    machine = OneSecond(HARDWARE["h100"])
    run = simulate(jobs, config, machine, scheduler_cls, check=True, keep_steps=True)
    expect(not run.num_preemptions, f"{run.num_preemptions} requests lose their seats")
    return read_steps(run, budget, bound, f"{seats} seats, budget {budget}")


def read_steps(run: Run, budget: int, bound: int, case: str) -> list[Step]:
    found = []
    begun: set[int] = set()
    ended: set[int] = set()
    for number, step in enumerate(run.steps, 1):
        # one that ends in this step has its last token at the end of it
        of_prompts = sum(num for _, num, is_prompt in step.items if is_prompt)
        there = {i for i, one in enumerate(run.requests) if one.arrival <= step.start}
        before = sorted(begun - ended)
        begun |= {i for i, *_ in step.items} | {*step.running}
        running = sorted(begun - ended)
        waiting = sorted(there - begun)
        room = budget - sum(num for _, num, _ in step.items)
        name = f"{case}, step {number}"
        found.append(Step(name, step.items, before, running, waiting, room, bound - of_prompts))
        ended |= {i for i in running if run.requests[i].token_times[-1] <= step.end}
    return found


def in_order(steps: list[Step], jobs: list[Job], kind: str | None = None) -> None:
    """Each is admitted after those of its kind that came before it."""
    for step in steps:
        for i in step.admitted:
            passed = [
                j
                for j in step.waiting
                if j < i and kind_of(jobs[i], kind) == kind_of(jobs[j], kind)
            ]
            expect(not passed, f"{step.name}: job {i} is admitted before job {passed[:1]}")


def kind_of(job: Job, kind: str | None) -> object:
    return job.extra_args[kind] if kind else None


# --- 16.1 ---
def check_1(answers) -> None:
    rng = random.Random(0)
    for budget, bound in ((16, 16), (16, 16), (32, 32), (40, 12)):
        arrivals = sorted(rng.randint(0, 30) for _ in range(12))
        jobs = [
            new_job(i, arrives, rng.randint(1, 2 * bound), rng.randint(1, 8))
            for i, arrives in enumerate(arrivals)
        ]
        jobs[5:5] = [new_job(20, arrivals[4], bound, 3), new_job(21, arrivals[4], bound + 1, 3)]
        judge_whole(answers, jobs, budget, bound)


def judge_whole(answers, jobs: list[Job], budget: int, bound: int) -> None:
    def step_budget(self) -> tuple[int, int]:
        return budget, bound

    policy = type("WholePrompts", (answers.WholePrompts,), {"step_budget": step_budget})
    steps = steps_of(jobs, policy, 6, budget, bound)
    in_order(steps, jobs)
    for step in steps:
        where = step.name if bound == budget else f"{step.name} with a bound of {bound}"
        for i, num, is_prompt in step.items:
            length = jobs[i].num_prompt_tokens
            if is_prompt and length <= bound:
                said = f"{where}: {num} of job {i}'s {length} prompt tokens are computed"
                expect(num == length, f"{said}, and they fit into a step")
            if i in step.admitted and length > bound:
                others = [j for j in step.running if j < i]
                said = f"{where}: job {i} begins, with a prompt of {length} tokens"
                expect(not others, f"{said}, though {others} run")
        if step.waiting and len(step.running) < 6:
            first = step.waiting[0]
            length = jobs[first].num_prompt_tokens
            said = f"{where}: job {first} waits with a prompt of {length} tokens"
            room = min(step.room, step.prompt_room)
            expect(length > room, f"{said}, though {room} are left")
            expect(step.running, f"{said}, though no request runs")


# --- 16.2 ---
def mixed(lengths: dict[str, int], count: int) -> list[Job]:
    """So many jobs, whose tenants take turns. All are there from the start."""
    names = sorted(lengths)
    return [
        new_job(i, 0, 4, lengths[names[i % len(names)]], tenant=names[i % len(names)])
        for i in range(count)
    ]


def check_2(answers) -> None:
    same = {"gold": 20, "free": 20}
    judge_weights(answers, {"gold": 3, "free": 1}, mixed(same, 80), 8)
    judge_weights(answers, {"gold": 3, "free": 1}, mixed(same, 80)[::-1], 8)
    judge_weights(answers, {"gold": 3, "free": 1}, mixed({"gold": 5, "free": 40}, 120), 8)
    three = {"a": 2, "b": 1, "c": 5}
    judge_weights(answers, three, mixed({"a": 30, "b": 7, "c": 15}, 120), 16)
    judge_weights(answers, {"gold": 1, "free": 1}, mixed({"gold": 3, "free": 30}, 80), 4)
    # gold comes when all seats are free's
    late = [new_job(i, 0, 4, 15 + i % 7, tenant="free") for i in range(60)]
    late += [new_job(60 + i, 20, 4, 10, tenant="gold") for i in range(60)]
    judge_weights(answers, {"gold": 3, "free": 1}, late, 8, since=45)
    expect_linear("requests, half of them run", partial(choice_of, answers.Weighted), 40)


def choice_of(scheduler_cls: type[Scheduler], count: int) -> Callable[[], Request | None]:
    """The choice among `count` requests."""
    scheduler = scheduler_cls(
        Limits(max_model_len=100, max_num_seqs=count, max_num_batched_tokens=100),
        BlockManager(count, 16),
    )
    for i in range(count):
        params = SamplingParams(extra_args={"tenant": ("gold", "free")[i % 2]})
        scheduler.add(Request(str(i), None, [i], params, arrival=i))
    scheduler.running = scheduler.waiting[::2]
    scheduler.waiting = scheduler.waiting[1::2]
    return scheduler.next_waiting


def judge_weights(
    answers, weights: dict[str, int], jobs: list[Job], seats: int, since: int = 0
) -> None:
    """The seats are counted from a step on: no request gives one up before its end."""
    policy = type("Weighted", (answers.Weighted,), {"weights": weights})
    steps = steps_of(jobs, policy, seats, 1000, 1000)
    in_order(steps, jobs, "tenant")
    case = f"weights {weights}, {seats} seats"
    held: Counter[str] = Counter()
    num_steps = 0
    for i, step in enumerate(steps):
        empty = seats - len(step.running)
        said = f"{case}: in step {i + 1}, {empty} are empty, though job {step.waiting[:1]} waits"
        expect(not (empty and step.waiting), said)
        if i >= since and {tenant_of(jobs[j]) for j in step.waiting} == {*weights}:
            held.update(tenant_of(jobs[j]) for j in step.running)
            num_steps += 1
    for name, weight in weights.items():
        mean = held[name] / num_steps if num_steps else 0
        wanted = weight * seats / sum(weights.values())
        said = f"{case}: {name} has {mean:.1f} of them on average while all have requests waiting"
        expect(abs(mean - wanted) < 0.5, f"{said}, and should have {wanted:g}")


def tenant_of(job: Job) -> str:
    return job.extra_args["tenant"]


# --- 16.3 ---
def check_3(answers) -> None:
    rng = random.Random(0)
    for seats, budget in ((4, 16), (1, 16), (2, 8), (5, 1000), (4, 16)):
        arrivals = sorted(rng.randint(0, 40) for _ in range(24))
        jobs = [
            new_job(i, at, rng.randint(1, 30), rng.randint(1, 12), urgent=rng.random() < 0.4)
            for i, at in enumerate(arrivals)
        ]
        judge_free_seat(steps_of(jobs, answers.KeepsOneFree, seats, budget, budget), jobs, seats)


def judge_free_seat(steps: list[Step], jobs: list[Job], seats: int) -> None:
    in_order(steps, jobs, "urgent")
    for step in steps:
        empty = seats - len(step.running)
        urgent = [i for i in step.waiting if jobs[i].extra_args["urgent"]]
        patient = [i for i in step.admitted if not jobs[i].extra_args["urgent"]]
        ran = [i for i, *_ in step.items if i in step.before]
        expect(ran == sorted(ran), f"{step.name}: tokens are given in the order {ran}")
        both = f"{step.name}: job {patient[:1]} is admitted, and {urgent[:1]}, urgent, waits"
        expect(not (patient and urgent), both)
        said = f"{step.name}: job {patient[:1]} is not urgent, and is admitted"
        expect(not patient or empty or len(step.running) == 1, f"{said}, and no seat stays free")
        if step.waiting and step.room > 0:
            first = (urgent or step.waiting)[0]
            said = f"{step.name}: job {first}, {'' if urgent else 'not '}urgent, waits"
            needed = 1 if urgent else 2
            expect(empty < needed, f"{said}, though {empty} seats are free")
            expect(step.running, f"{said}, though nothing runs")
