"""The ten jobs of chapter 16: four answers that run, a long prompt, and five questions behind it."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

from nanovllm import Job, Run, Served, simulate
from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from nanovllm.topics.simulator.machines import Machine
from tutorials.simulation.metrics import meets_deadline

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


def run_ten(scheduler_cls: type[Scheduler] = Scheduler, machine: str | Machine = "h100") -> Run:
    return simulate(ten_jobs(), FIVE_SEATS, machine, scheduler_cls, check=True, keep_steps=True)


def first_token(request: Served) -> float:
    """Milliseconds from the arrival to the first token."""
    return 1000 * (request.token_times[0] - request.arrival)


def longest_pause(requests: list[Served]) -> float:
    """Milliseconds between two tokens of the same answer."""
    return 1000 * max(b - a for request in requests for a, b in pairwise(request.token_times))


def late(requests: list[Served]) -> str:
    """The names of the jobs that miss their deadlines."""
    return "".join(name for name, one in zip(NAMES, requests) if not meets_deadline(one)) or "-"


def show_jobs() -> None:
    show_row("job", NAMES)
    for name, cells in ROWS.items():
        show_row(name, cells)


def show(*scheduler_classes: type[Scheduler], machine: str | Machine = "h100") -> None:
    """Prints a row for each: milliseconds to the first token of each job, their mean, the longest
    pause of an answer, and which jobs end too late."""
    show_row("first token after", [*NAMES, "mean", "pause", "late"])
    for scheduler_cls in scheduler_classes:
        requests = run_ten(scheduler_cls, machine).requests
        times = [first_token(request) for request in requests]
        numbers = [*times, mean(times), longest_pause(requests)]
        cells = [f"{number:.0f}" for number in numbers]
        show_row(scheduler_cls.__name__, [*cells, late(requests)])


def show_row(name: str, cells: Sequence[object]) -> None:
    of_jobs, of_all = cells[: len(NAMES)], cells[len(NAMES) :]
    row = [f"{cell:>4}" for cell in of_jobs] + [f"{cell:>6}" for cell in of_all]
    print(f"{name:17}", *row)
