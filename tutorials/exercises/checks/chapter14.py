"""Checks of chapter 14: a promise for each token, conversations under a virtual clock, the constants of a machine."""

import random
from collections.abc import Callable
from types import SimpleNamespace

from nanovllm import Job, simulate
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.cost_model import HARDWARE
from nanovllm.topics.simulator.machines import Machine
from nanovllm.topics.simulator.replica import items_of
from tutorials.exercises.checks.expect import expect, unchanged

# --- 14.1 ---

KEPT = (10.0, 3, [11.0, 11.5, 12.0])  # by a promise of 1 s, and 0.5 s for each further token
PAUSE = (10.0, 4, [10.25, 10.25, 11.0, 11.0])  # one pause of 0.75 s; the mean is 0.25 s
ALONE = (4.0, 1, [5.0])


def check_1(answers) -> None:
    for name, requests, right in (
        ("each token comes just in time", [KEPT], 1.0),
        ("the first token is late", [KEPT, (10.0, 2, [11.25, 11.5])], 0.5),
        ("one pause is too long, the mean pause is not", [KEPT, KEPT, PAUSE, KEPT], 0.75),
        ("the last pause is too long", [KEPT, (0.0, 3, [0.5, 1.0, 1.53125])], 0.5),
        ("an answer of one token, in time", [ALONE, PAUSE], 0.5),
        ("an answer of one token, too late", [(4.0, 1, [5.03125])], 0.0),
        ("one is unfinished", [KEPT, (10.0, 4, [10.5, 11.0])], 0.5),
        ("one lacks its last token", [KEPT, (10.0, 3, [10.5, 11.0])], 0.5),
        ("one has no token", [KEPT, KEPT, (10.0, 2, []), PAUSE], 0.5),
        ("none is kept", [PAUSE, PAUSE], 0.0),
    ):
        said = unchanged(answers.promised, requests, 1.0, 0.5)
        expect(abs(said - right) < 1e-9, f"{name}: {right:g}, and promised says {said}")
    for first, pause, right in ((0.0, 9.0, 0), (1.0, 0.75, 1), (0.25, 0.75, 0.5), (9.0, 0.25, 0)):
        said = unchanged(answers.promised, [KEPT, PAUSE], first, pause)
        case = f"a promise of {first:g} s, and {pause:g} s for each further token"
        expect(said == right, f"{case}: {right:g}, and promised says {said}")


# --- 14.2 ---

BUDGET = 16
SEATS = 4
BLOCKS = 40
MOST_STEPS = 2000
Talk = list[tuple]  # of (name, time, num_prompt, num_outputs), and after


def seconds_of(items) -> float:
    """All times are sums of these, without an error."""
    return 0.25 + 0.03125 * sum(num_tokens for num_tokens, _ in items)


class Played(Machine):
    """A machine for `simulate`, which says what is right."""

    def seconds(self, shape, items, *args, **kwargs) -> float:
        return seconds_of(items)


def right_times(jobs: Talk) -> dict[str, list[float]]:
    places = {name: i for i, (name, *_) in enumerate(jobs)}
    played = []
    for i, (_, time, num_prompt, num_outputs, *after) in enumerate(jobs):
        follows = places[after[0]] if after else None
        prompt = ((i + 1, num_prompt),)
        played.append(Job(time, prompt, num_outputs, answer=1000, max_tokens=64, after=follows))
    seats = dict(max_num_batched_tokens=BUDGET, max_num_seqs=SEATS)
    config = Config(model="qwen3-0.6b", num_blocks=BLOCKS, max_model_len=256, **seats)
    run = simulate(played, config, Played(HARDWARE["h100"]), check=True)
    return {name: [*one.token_times] for (name, *_), one in zip(jobs, run.requests)}


def random_talks(seed: int) -> Talk:
    rng = random.Random(seed)
    jobs: Talk = []
    for i in range(24):
        job = (f"r{i}", rng.randrange(40) / 4, rng.randint(1, 40), rng.randint(1, 8))
        follows = i > 4 and rng.random() < 0.5
        jobs.append((*job, rng.choice(jobs)[0]) if follows else job)
    return jobs


CASES: dict[str, Talk] = {
    "one job": [("a", 0.0, 5, 3)],
    "nothing to do until 7 s": [("a", 7.0, 5, 3)],
    "nothing to do between two jobs": [("a", 1.0, 5, 2), ("b", 50.0, 4, 2)],
    "b comes during a step of a": [("a", 0.0, 8, 6), ("b", 0.3125, 4, 2)],
    "b comes just when a step of a ends": [("a", 0.0, 8, 6), ("b", 0.5, 4, 2)],
    "the first in the list comes last": [("a", 9.0, 4, 2), ("b", 0.0, 4, 3), ("c", 2.0, 6, 2)],
    "b follows a": [("a", 0.0, 6, 3), ("b", 2.0, 7, 2, "a")],
    "b follows a at once": [("a", 0.0, 6, 3), ("b", 0.0, 7, 2, "a"), ("c", 0.25, 3, 9)],
    "c follows b, and b follows a": [
        ("a", 0.5, 6, 3),
        ("b", 1.0, 7, 2, "a"),
        ("c", 0.5, 5, 2, "b"),
        ("d", 1.0, 12, 8),
    ],
    "three follow a": [
        ("a", 0.0, 6, 2),
        ("b", 3.0, 16, 2, "a"),
        ("c", 1.0, 16, 2, "a"),
        ("d", 3.0, 16, 2, "a"),
    ],
    "more come at once than there are seats": [(name, 1.0, 9, 3) for name in "abcdef"],
    "a prompt of three steps": [("a", 0.0, 40, 3), ("b", 0.25, 3, 5)],
    "24 jobs": random_talks(0),
    "24 others": random_talks(1),
}


def watched(case: str) -> Callable[[Schedule], float]:
    """Seconds of a step; it must compute something, and there must not be too many."""
    num_steps = 0
    last = None

    def seconds(schedule: Schedule) -> float:
        nonlocal num_steps, last
        expect(schedule is not last, f"{case}: seconds is asked twice for step {num_steps}")
        last = schedule
        num_steps += 1
        expect(schedule.items, f"{case}: step {num_steps} computes nothing")
        expect(num_steps < MOST_STEPS, f"{case}: it still runs after {num_steps} steps")
        return seconds_of(items_of(schedule))

    return seconds


def check_2(answers) -> None:
    for case, jobs in CASES.items():
        config = Config(model="", max_num_batched_tokens=BUDGET, max_num_seqs=SEATS)
        limits = config.resolved(256, BUDGET)
        scheduler = Scheduler(limits, BlockManager(BLOCKS, 16))
        given = [answers.Job(*job) for job in jobs]
        said = answers.serve(scheduler, [*given], watched(case))
        for name, right in right_times(jobs).items():
            times = [*said.get(name, [])]
            how_many = f"{case}: {name} gets {len(right)} tokens, and serve has {len(times)}"
            expect(len(times) == len(right), how_many)
            for i, (time, at) in enumerate(zip(right, times), 1):
                place = f"{case}: token {i} of {name} comes at {time:g} s"
                expect(abs(time - at) < 1e-9, f"{place}, and serve says {at:g}")


# --- 14.3 ---

NAMES = ("step", "sequence", "token", "token in a context")


class Disturbed:
    """A machine of four constants. Of each three steps, two are disturbed."""

    def __init__(self, constants: tuple[float, ...], seed: int):
        self.constants = constants
        self.rng = random.Random(seed)
        self.factors: list[float] = []
        self.num_steps = 0

    def step(self, items: list[tuple[int, int]]) -> float:
        self.num_steps += 1
        expect(self.num_steps <= 60, "it takes more than 60 steps")
        expect(len(items) > 0, "a step has no item")
        for tokens, context in items:
            expect(1 <= tokens <= context, f"there is no item ({tokens}, {context})")
        tokens, contexts = map(sum, zip(*items))
        counts = (1, len(items), tokens, contexts)
        seconds = sum(constant * count for constant, count in zip(self.constants, counts))
        if not self.factors:
            self.factors = [1.0, self.rng.uniform(1.1, 1.3), self.rng.uniform(1.2, 4.0)]
            self.rng.shuffle(self.factors)
        return seconds * self.factors.pop()


def check_3(answers) -> None:
    for seed, constants in enumerate(
        (
            (1e-3, 2e-5, 3e-5, 4e-8),
            (3e-4, 4e-6, 2e-5, 3e-8),
            (5e-3, 5e-5, 1e-6, 2e-6),
            (2e-4, 3e-4, 4e-5, 5e-6),
        )
    ):
        step = Disturbed(constants, seed).step
        said = answers.measured(SimpleNamespace(step=lambda items, step=step: step(items)))
        expect(len(said) == 4, f"four numbers are wanted, and measured says {len(said)}")
        for name, right, number in zip(NAMES, constants, said):
            text = f"seconds per {name}: {right:g}, and measured says {number:.3g}"
            expect(abs(number / right - 1) <= 0.02, text)
