"""The smallest simulator: the engine's own scheduler, a clock that is a number, and no model.

Chapter 14 begins with it. `nanovllm.simulate` runs the same loop with conversations, checks and several
replicas. Imports no torch.
"""

from collections.abc import Callable
from typing import NamedTuple

from nanovllm.block_manager import BlockManager
from nanovllm.config import Limits
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

Times = dict[str, list[float]]  # for each request, when its tokens came


class Asked(NamedTuple):
    name: str
    arrival: float  # seconds
    num_prompt: int  # tokens
    num_outputs: int


FOUR = [  # the requests of chapter 00
    Asked("sum", 0.0, 18, 6),
    Asked("sort", 0.0, 19, 4),
    Asked("book", 0.0, 47, 3),
    Asked("late", 0.006, 14, 5),
]


def request_of(asked: Asked, arrival: int) -> Request:
    """It comes as the `arrival`-th. No two prompts begin alike."""
    prompt = [1000 + arrival] * asked.num_prompt
    params = SamplingParams(max_tokens=asked.num_outputs)
    return Request(asked.name, None, prompt, params, arrival=arrival)


def serve(jobs: list[Asked], seconds: Callable[[Schedule], float], budget: int) -> Times:
    """Serves the jobs, which are in order of arrival. `seconds` says how long a step takes."""
    limits = Limits(max_model_len=2000, max_num_batched_tokens=budget, max_num_seqs=16)
    scheduler = Scheduler(limits, BlockManager(num_blocks=1000, block_size=16))
    coming = [request_of(asked, i) for i, asked in enumerate(jobs)]
    arrivals = [asked.arrival for asked in jobs]
    times: Times = {asked.name: [] for asked in jobs}
    now = 0.0
    while coming or scheduler.has_unfinished():
        if not scheduler.has_unfinished():
            now = max(now, arrivals[0])
        while coming and arrivals[0] <= now:
            scheduler.add(coming.pop(0))
            arrivals.pop(0)
        schedule = scheduler.schedule()
        now += seconds(schedule)
        for seq in schedule.sampled:
            times[seq.request.request_id].append(now)
        scheduler.update(schedule, [7] * len(schedule.sampled))
    return times


def compare(seconds: Callable[[Schedule], float], budgets: tuple[int, ...] = (24, 98)) -> None:
    """Prints in ms how long each of the four waits for its first token, and when all are done."""
    print("budget", *(f"{asked.name:>6}" for asked in FOUR), "  all done")
    for budget in budgets:
        times = serve(FOUR, seconds, budget)
        waits = [times[asked.name][0] - asked.arrival for asked in FOUR]
        end = max(max(tokens) for tokens in times.values())
        print(f"{budget:6}", *(f"{1e3 * wait:6.1f}" for wait in waits), f"{1e3 * end:10.1f}")
