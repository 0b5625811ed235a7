"""Checks of chapter 03: a table by hand, aging, and the scheduler's rule."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import mean
from unittest.mock import patch

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from tutorials.exercises.checks.expect import Wrong, expect
from tutorials.play import Job, play, random_jobs


def check_1(answers) -> None:
    log = play([("A", 0, 6, 3), ("B", 0, 5, 2)], budget=4)
    said = answers.predict()
    for name in "AB":
        for i, cells in enumerate(log):
            mine = cells.get(name, "")
            yours = (said.get(name) or [])[i : i + 1]
            sentence = f"step {i + 1}: {name} is {mine!r} in the table, and {yours} in yours"
            expect(yours == [mine], sentence)


def mean_waits(scheduler_cls) -> tuple[float, float]:
    """Of all requests, and of the long ones."""
    jobs = random_jobs(200)  # as in the chapter
    begun: dict[str, int] = {}
    # six seats need no more blocks than these, and each step checks all blocks
    for i, cells in enumerate(play(jobs, scheduler_cls, seats=6, num_blocks=250)):
        for name, cell in cells.items():
            if cell[0].isdigit():
                begun.setdefault(name, i)
    waits = [begun[job.name] - job.arrival for job in jobs]
    long = [wait for wait, job in zip(waits, jobs) if job.num_output == 100]
    return mean(waits), mean(long)


def passes(answers, arrival: int, distance: int) -> bool:
    """Whether a request for 5 tokens goes before one for 100 that came so much earlier."""
    long = Request("long", None, [1], SamplingParams(max_tokens=100), arrival=arrival)
    short = Request("short", None, [1], SamplingParams(max_tokens=5), arrival=arrival + distance)
    priority = answers.Aging.priority
    return priority(answers.Aging, short) < priority(answers.Aging, long)


def check_2(answers) -> None:
    of_all, long = mean_waits(answers.Aging)
    said = f"all wait {of_all:.1f} steps in the mean, the long ones {long:.1f}"
    hint = "The more the arrival counts, the more it is first come, first served."
    text = f"{said}; it should be less than 115 and less than 155. " + hint
    expect(of_all < 115 and long < 155, text)
    expect(passes(answers, 0, 1), "a short request does not pass a long one that came just before")
    text = "a short one that comes 10,000 requests later passes, too"
    expect(not passes(answers, 0, 10_000), text)
    for distance in (3, 20, 50, 90, 200):
        results = {passes(answers, arrival, distance) for arrival in range(0, 20_000, 77)}
        expect(
            len(results) == 1,
            f"a short request comes {distance} requests after a long one. Whether it passes depends on "
            "the number of the long one, and not only on the distance",
        )


def check_3(answers) -> None:
    rng = random.Random(0)
    cases = []
    for budget, seats in ((8, 100), (1000, 2), (16, 3), (5, 4), (64, 8)):
        arrivals = sorted(rng.randint(0, 12) for _ in range(8))
        jobs = [
            Job(name, arrival, rng.randint(1, 40), rng.randint(1, 9))
            for name, arrival in zip("ABCDEFGH", arrivals)
        ]
        cases.append((budget, seats, jobs))
    # when it is B's turn, A has taken the whole budget
    cases.append((8, 100, [Job("A", 0, 8, 2), Job("B", 0, 1, 2)]))
    for budget, seats, jobs in cases:
        right = play(jobs, budget=budget, seats=seats)
        with without_scheduler():
            said = play(jobs, answers.Rule, budget=budget, seats=seats)
        for i, (mine, yours) in enumerate(zip(right, said), 1):
            for name in "ABCDEFGH":
                where = f"budget {budget}, {seats} seats, step {i}: {name} is"
                cells = f"{mine.get(name, '')!r} with Scheduler, {yours.get(name, '')!r} with Rule"
                expect(mine.get(name) == yours.get(name), f"{where} {cells}")
        expect(len(right) == len(said), f"{len(said)} steps, and Scheduler has {len(right)}")
    check_equal_prompts(answers.Rule)


@contextmanager
def without_scheduler() -> Iterator[None]:
    """The methods that the answer is to replace say so."""

    def refuse(*args):
        raise Wrong("it asks Scheduler for its plan: write the rule yourself")

    with ExitStack() as stack:
        for name in ("schedule", "schedule_running", "schedule_waiting"):
            stack.enter_context(patch.object(Scheduler, name, refuse))
        yield


def check_equal_prompts(rule) -> None:
    """The second of two equal prompts finds the first one's blocks when it is admitted."""
    limits = Limits(max_model_len=100, max_num_batched_tokens=1000, max_num_seqs=10)
    scheduler = rule(limits, BlockManager(num_blocks=50, block_size=4))
    for i in range(2):
        params = SamplingParams(max_tokens=2)
        scheduler.add(Request("AB"[i], None, [5] * 21, params, arrival=i))
    _, (_, start, num_tokens) = scheduler.schedule().items
    said = f"A and B have the same 21 tokens: B finds {start} of them when it is admitted"
    expect(start + num_tokens == 21, f"{said}, but Rule computes {num_tokens} more, and not 1")
