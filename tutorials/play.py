"""Plays a scheduler without a model: each token is a 7. Says what every step computes, and for which request."""

import random
from typing import NamedTuple

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.checks.blocks import check_blocks

Cells = dict[str, str]  # of one step: for each request what happens to it


class Job(NamedTuple):
    name: str
    arrival: int  # the step before which it comes
    num_prompt: int  # tokens
    num_output: int


def random_jobs(count: int, seed: int = 1) -> list[Job]:
    """Jobs that come every five steps on average, with short prompts. A quarter of them want 100
    tokens, the others 5, 10 or 20."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    now = 0
    for i in range(count):
        now += int(rng.expovariate(1 / 5))
        jobs.append(Job(f"r{i}", now, rng.randint(5, 40), rng.choice((5, 10, 20, 100))))
    return jobs


def play(
    jobs: list[Job] | list[tuple[str, int, int, int]],
    scheduler_cls=Scheduler,
    *,
    budget: int = 1000,
    seats: int = 100,
    num_blocks: int = 1000,
    block_size: int = 4,
    num_host_blocks: int = 0,
    caching: bool = True,
) -> list[Cells]:
    """Runs the jobs, in the order of their arrival. Returns the cells of each step."""
    limits = Limits(max_model_len=2000, max_num_batched_tokens=budget, max_num_seqs=seats)
    manager = BlockManager(num_blocks, block_size, caching, num_host_blocks)
    scheduler = scheduler_cls(limits, manager)
    coming = [Job(*job) for job in jobs]
    log: list[Cells] = []
    while coming or scheduler.has_unfinished():
        while coming and coming[0].arrival <= len(log):
            job = coming.pop(0)
            arrival = len(jobs) - len(coming)
            prompt = [1000 + arrival] * job.num_prompt  # no two prompts begin alike
            params = SamplingParams(max_tokens=job.num_output)
            scheduler.add(Request(job.name, None, prompt, params, arrival=arrival))
        before = [*scheduler.running]
        schedule = scheduler.schedule()
        if not (schedule.items or coming):
            raise ScheduleError(scheduler, "schedule", f"step {len(log) + 1} computes nothing")
        log.append(cells_of(scheduler, schedule, before))
        scheduler.update(schedule, [7] * len(schedule.sampled))
        check_blocks(manager, [seq for r in scheduler.unfinished() for seq in r.unfinished])
    return log


def cells_of(scheduler: Scheduler, schedule: Schedule, before: list[Request]) -> Cells:
    """Tokens computed, with a star if the request gets a token; "X" if it is preempted in this
    step, "." if it waits, "-" if it runs and the budget has nothing left for it."""
    cells = {r.request_id: "X" if r in before else "." for r in scheduler.waiting}
    cells |= {r.request_id: "-" for r in scheduler.running}
    for seq, _, num_tokens in schedule.items:
        cells[seq.request.request_id] = f"{num_tokens}{'*' * (seq in schedule.sampled)}"
    cells["free"] = str(scheduler.block_manager.num_free_blocks)
    return cells


def tokens(cells: Cells) -> int:
    """Tokens computed in one step."""
    numbers = [cell.strip("*") for name, cell in cells.items() if name != "free"]
    return sum(int(number) for number in numbers if number.isdigit())


def num_preemptions(log: list[Cells]) -> int:
    return sum(cell == "X" for cells in log for cell in cells.values())


def show(log: list[Cells], names: str = "ABC", blocks: bool = False, first: int = 1) -> None:
    """Prints a row for each step, numbered from `first` on, with the free blocks if they matter."""
    header = ["step", *(f"{name:>4}" for name in names), " tokens", " free blocks"]
    print(*header if blocks else header[:-1])
    for i, cells in enumerate(log, first):
        row = [f"{i:4}", *(f"{cells.get(name, ''):>4}" for name in names), f"{tokens(cells):7}"]
        print(*row, f"{cells['free']:>12}") if blocks else print(*row)
