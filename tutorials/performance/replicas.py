"""Conversations with two real replicas: what each router finds in their caches, and what it gains.

    OMP_NUM_THREADS=1 python -m tutorials.performance.replicas --json tutorials/results/cpu_replicas.json

The server is `nanovllm serve --replicas 2` with the embedded model; the clients are in this
process. Each user asks, reads, thinks, and sends all so far with the next question. The routers
take turns, each time with new processes.

The simulator serves the same conversations, for chapter 15. Its machine is one thread of a CPU. The
real replicas share two cores with all else that runs: the clients, the web server and Ray. So each
step is made as much slower as it takes until round robin ends as many turns per second as in
reality. What the other routers change is then the simulator's own guess.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from statistics import mean

import httpx

from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.routing import router
from nanovllm.simulator import Job, simulate
from nanovllm.simulator.machines import MACHINES, Machine
from tutorials.arguments import experiment, positive
from tutorials.machine import device_name, environment, installed
from tutorials.performance.serving import Process, free_port
from tutorials.report import aligned, median, percentile, rows_of, write_json

ROUTERS = ("RoundRobin", "LeastLoaded", "PrefixAffinity")
TURNS = 6
QUESTION = 150  # tokens
ANSWER = 20
THINK = 0.3  # seconds, in the mean
BLOCKS = 1200  # of 16 tokens, in each replica: room for half of the conversations and a bit
SAID = 1  # the token of which an answer is made in the next prompt; a replica has drawn others
DRAWN = 2  # by a simulated one


def conversations(num_users: int, seed: int) -> list[Job]:
    """The turns of each user, one user after the other. The answers are made up, so that the load
    is the same with every router."""
    jobs: list[Job] = []
    for user in range(num_users):
        rng = random.Random(f"{user} {seed}")
        history: tuple[tuple[int, int], ...] = ()
        after = None
        for _ in range(TURNS):
            history = (*history, (len(jobs) + 3, QUESTION))
            jobs.append(Job(rng.expovariate(1) * THINK, history, ANSWER, DRAWN, after=after))
            history = (*history, (SAID, ANSWER))
            after = len(jobs) - 1
    return jobs


async def talk(client: httpx.AsyncClient, jobs: Sequence[Job]) -> list[dict]:
    """The turns of one user: prompt tokens, how many of them were cached, seconds to the first
    token."""
    turns = []
    for job in jobs:
        await asyncio.sleep(job.time)
        turns.append(await ask(client, job.prompt_token_ids))
    return turns


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> dict:
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    first = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
    usage = event["usage"]
    assert first is not None
    return {
        "ttft": first - begin,
        "seconds": time.perf_counter() - begin,
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def load(url: str, jobs: list[Job]) -> dict:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(ask(client, [user] * 5) for user in range(8)))  # warms up
        begin = time.perf_counter()
        users = await asyncio.gather(*(talk(client, turns) for turns in of_each_user(jobs)))
        seconds = time.perf_counter() - begin
    turns = [turn for user in users for turn in user]
    cached, prompts = (sum(turn[name] for turn in turns) for name in ("cached", "prompt"))
    return numbers([turn["ttft"] for turn in turns], cached / prompts, seconds)


def of_each_user(jobs: list[Job]) -> list[list[Job]]:
    return [jobs[i : i + TURNS] for i in range(0, len(jobs), TURNS)]


def numbers(ttfts: list[float], hit_rate: float, seconds: float) -> dict:
    return {
        "hit_rate": hit_rate,
        "ttft_ms": {"mean": 1e3 * mean(ttfts)}
        | {f"p{q}": 1e3 * percentile(ttfts, q) for q in (50, 90, 99)},
        "turns_per_second": len(ttfts) / seconds,
    }


# --- simulated ---


def simulated(name: str, jobs: list[Job], machine: Machine) -> dict:
    config = Config(model=EMBEDDED_MODEL, dtype="float32", device="cpu", num_blocks=BLOCKS)
    run = simulate(jobs, config, machine, replicas=2, router_cls=getattr(router, name))
    ttfts = [served.token_times[0] - served.arrival for served in run.requests]
    return numbers(ttfts, run.num_cached_tokens / run.num_prompt_tokens, run.seconds)


def as_busy(jobs: list[Job], turns_per_second: float) -> Machine:
    """One thread, so much slower that round robin ends so many turns per second: by bisection."""
    low, high = 1.0, 100.0
    while high / low > 1.001:
        factor = (low * high) ** 0.5
        found = simulated("RoundRobin", jobs, MACHINES["cpu"].slower(factor))
        low, high = (
            (factor, high) if found["turns_per_second"] > turns_per_second else (low, factor)
        )
    return MACHINES["cpu"].slower(low)


# --- measured ---


def measure(name: str, jobs: list[Job]) -> dict:
    port = free_port()
    options = (
        f"--replicas 2 --router-cls nanovllm.routing:{name} --num-blocks {BLOCKS} "
        f"--dtype float32 --port {port}"
    )
    with Process("nanovllm", "serve", *options.split(), port=port) as server:
        wait_until_healthy(server)
        return asyncio.run(load(server.url, jobs))


def wait_until_healthy(server: Process) -> None:
    while server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise ValueError("the server has ended")


def real_rows(report: dict) -> list[list[str]]:
    """Routers of two real replicas."""
    columns = [("hit_rate", ".0%"), *((f"ttft_ms.{q}", ",.0f") for q in ("p50", "p90", "p99"))]
    columns.append(("turns_per_second", ".1f"))
    return rows_of("router|hits|TTFT p50 (ms)|p90|p99|turns/s", columns, report["runs"])


def both_rows(report: dict) -> list[list[str]]:
    """Routers of two real replicas, and of two simulated ones."""
    header = "router|hits: real|simulated|TTFT mean (ms): real|simulated|turns/s: real|simulated"
    numbers = [("hit_rate", ".0%"), ("ttft_ms.mean", ".0f"), ("turns_per_second", ".1f")]
    columns = [(f"{kind}.{key}", how) for key, how in numbers for kind in ("real", "simulated")]
    records = {
        name: {"real": run, "simulated": report["simulated"][name]}
        for name, run in report["runs"].items()
    }
    return rows_of(header, columns, records)


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--users", type=positive, default=24)
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args()
    import torch

    jobs = [conversations(args.users, seed) for seed in range(args.rounds)]
    runs: dict[str, list[dict]] = {name: [] for name in ROUTERS}
    guesses: dict[str, list[dict]] = {name: [] for name in ROUTERS}
    for own in jobs:
        for name in ROUTERS:
            runs[name].append(measure(name, own))
            print(name, runs[name][-1], flush=True)
        machine = as_busy(own, runs["RoundRobin"][-1]["turns_per_second"])
        for name in ROUTERS:
            guesses[name].append(simulated(name, own, machine))
            print(name, "simulated", guesses[name][-1], flush=True)
    report = environment() | {
        "device": device_name(torch.device("cpu"), threads=1),
        "versions": installed("torch", "ray"),
        "users": args.users,
        "turns": TURNS,
        "runs": {name: median(ones) for name, ones in runs.items()},
        "simulated": {name: median(ones) for name, ones in guesses.items()},
        "rounds": {"real": runs, "simulated": guesses},
    }
    print(aligned(real_rows(report)), aligned(both_rows(report)), sep="\n\n")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
