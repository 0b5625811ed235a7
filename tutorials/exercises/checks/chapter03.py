"""Checks of chapter 03: a table by hand, aging, and the scheduler's rule."""

import random
from statistics import mean

from nanovllm import SamplingParams
from nanovllm.sequence import Request
from tutorials.exercises.checks.expect import expect
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
    said = f"all wait {of_all:.0f} steps in the mean, the long ones {long:.0f}"
    hint = "The more the arrival counts, the more it is first come, first served."
    expect(
        of_all < 100 and long < 155,
        f"{said}; it should be less than 100 and less than 155. " + hint,
    )
    expect(passes(answers, 0, 1), "a short request does not pass a long one that came just before")
    expect(
        not passes(answers, 0, 10_000), "a short one that comes 10,000 requests later passes, too"
    )
    for distance in (3, 20, 50, 90, 200):
        results = {passes(answers, arrival, distance) for arrival in range(0, 200, 7)}
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
        said = play(jobs, answers.Rule, budget=budget, seats=seats)
        for i, (mine, yours) in enumerate(zip(right, said), 1):
            for name in "ABCDEFGH":
                where = f"budget {budget}, {seats} seats, step {i}: {name} is"
                cells = f"{mine.get(name, '')!r} with Scheduler, {yours.get(name, '')!r} with Rule"
                expect(mine.get(name) == yours.get(name), f"{where} {cells}")
        expect(len(right) == len(said), f"{len(said)} steps, and Scheduler has {len(right)}")
