"""The ten jobs of chapter 16: four answers that run, a long prompt, and five questions behind it."""

from itertools import pairwise
from statistics import mean

from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from nanovllm.simulator import Job, Run, simulate
from nanovllm.simulator.jobs import Served

NAMES = "ABCDEFGHIJ"
ROWS = {  # times are in milliseconds, lengths in tokens
    "arrives": (0, 0, 0, 0, 20, 30, 40, 60, 80, 100),
    "prompt": (100, 100, 100, 100, 8000, 100, 100, 100, 100, 100),
    "answer": (30, 36, 42, 48, 10, 3, 12, 20, 6, 2),
    "deadline": (900, 900, 900, 900, 900, 900, 500, 900, 500, 100),  # after the arrival
    "of": ("ann", "ann", "ann", "ann", "ann", "ann", "bob", "ann", "bob", "bob"),
}
FIVE_SEATS = Config(model="qwen3-8b", num_blocks=1000, max_num_seqs=5, max_num_batched_tokens=1024)


def ten_jobs() -> list[Job]:
    """No two prompts begin alike. The scheduler is told the length of each answer."""
    jobs = []
    for i, (arrives, prompt, answer, deadline, of) in enumerate(zip(*ROWS.values())):
        said = {"tenant": of, "deadline": deadline / 1000, "predicted_tokens": answer}
        runs = ((2 * i + 1, prompt),)
        jobs.append(Job(arrives / 1000, runs, answer, 2 * i + 2, 64, said))
    return jobs


def run_ten(scheduler_cls: type[Scheduler] = Scheduler) -> Run:
    return simulate(ten_jobs(), FIVE_SEATS, "h100", scheduler_cls, check=True, keep_steps=True)


def first_token(request: Served) -> float:
    """Milliseconds from the arrival to the first token."""
    return 1000 * (request.token_times[0] - request.arrival)


def longest_pause(requests: list[Served]) -> float:
    """Milliseconds between two tokens of the same answer."""
    return 1000 * max(b - a for request in requests for a, b in pairwise(request.token_times))


def show_jobs() -> None:
    show_row("job", NAMES)
    for name, cells in ROWS.items():
        show_row(name, cells)


def show(*scheduler_classes: type[Scheduler]) -> None:
    """Prints a row for each: milliseconds to the first token of each job, their mean, and the longest
    pause of an answer that runs."""
    show_row("first token after", [*NAMES, "mean", "pause"])
    for scheduler_cls in scheduler_classes:
        requests = run_ten(scheduler_cls).requests
        times = [first_token(request) for request in requests]
        numbers = [*times, mean(times), longest_pause(requests)]
        show_row(scheduler_cls.__name__, [f"{number:.0f}" for number in numbers])


def show_row(name: str, cells) -> None:
    print(
        f"{name:17}", *(f"{cell:>4}" for cell in cells[:10]), *(f"{cell:>6}" for cell in cells[10:])
    )
