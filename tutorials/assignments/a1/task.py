"""Assignment 1: head-of-line blocking. What is served, and what is measured."""

from dataclasses import replace

from nanovllm import Job, Run, Served
from nanovllm.config import Config
from tutorials.assignments.task import Goal, NotCounted, Part, Task, mean_latency
from tutorials.simulation.metrics import latency
from tutorials.simulation.workloads import lognormal, merged, poisson, predicted, workload

# from year to year: another value, and the goals are measured again
LOAD = 1.2  # what short questions ask for, as a part of what their seats can do
STARVED = 13.5  # seconds: a wait that earns nothing
ORDERED = 0.85  # of FCFS's mean latency: an order that is worse than this earns nothing
TOKEN = 0.007  # seconds: what each token of an answer takes if nothing stands in its way


def paced(jobs: list[Job], seats: int, load: float) -> list[Job]:
    """The same jobs, at a pace at which their answers take `load` times the time of all seats. By
    chance alone, one seed would be a much lighter load than another."""
    needed = TOKEN * sum(job.num_outputs for job in jobs) / seats
    factor = needed / load / jobs[-1].time
    return [job._replace(time=factor * job.time) for job in jobs]


def chats(seed: int) -> list[Job]:
    """500 requests in about 18 s, half as many again as 16 seats can serve, each with a guess of
    its answer's length."""
    lengths = lognormal(prompt=120, output=120, sigma=1.0, seed=seed)
    jobs = workload(poisson(rate=30, seed=seed), lengths, count=500)
    return predicted(paced(jobs, seats=16, load=1.45), sigma=0.5, seed=seed)


def short_questions(seed: int) -> list[Job]:
    """For about 48 s come short questions, somewhat more than 4 seats can serve. Among the first of
    them are twelve with long answers."""
    short = lognormal(prompt=60, output=40, sigma=0.4, seed=seed)
    long = lognormal(prompt=60, output=300, sigma=0.3, seed=seed + 1)
    jobs = merged(
        workload(poisson(rate=14.5, seed=seed), short, count=725),
        workload(poisson(rate=1, seed=seed + 1), long, count=12),
    )
    return predicted(paced(jobs, seats=4, load=LOAD), sigma=0.5, seed=seed)


def latency_share(run: Run, baseline: Run) -> float:
    return mean_latency(run) / mean_latency(baseline)


def wait(request: Served) -> float:
    """All seconds until its last token that the answer itself did not need. So a request that gets
    one token and is then preempted still waits."""
    return latency(request) - TOKEN * len(request.token_times)


def longest_wait(run: Run, baseline: Run) -> float:
    """Counts only if the mean latency is much shorter than that of FCFS, which starves no request."""
    longest, share = max(map(wait, run.requests)), latency_share(run, baseline)
    if share < ORDERED:
        return longest
    value = NotCounted(STARVED)
    why = f"mean latency {share:.3f} of FCFS, must be below {ORDERED}"
    value.said = f"{longest:.3f}, does not count: {why}"
    return value


SERVER = Config(
    model="qwen3-8b",
    num_blocks=1000,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_model_len=2048,
)
TASK = Task(
    "Head-of-line blocking: shortest job first, and nobody starves",
    [
        Part(
            "chats",
            chats,
            SERVER,
            [Goal("mean latency / that of FCFS", latency_share, none=0.85, full=0.65, points=30)],
            points=10,
        ),
        Part(
            "short questions",
            short_questions,
            replace(SERVER, max_num_seqs=4),
            [Goal("longest wait (s)", longest_wait, none=STARVED, full=12.0, points=40)],
            points=10,
        ),
    ],
)
