"""Conversations with two real replicas: what each router finds in their caches, and what it gains.

    python -m tutorials.performance.replicas --json tutorials/results/cpu_replicas.json

The server is `nanovllm serve --replicas 2` with the embedded model; the clients are in this
process. Each user asks, reads, thinks, and sends all so far with the next question. The routers
take turns, each time with new processes.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

import httpx

from nanovllm import router
from tutorials.performance.machine import device_name, environment, installed
from tutorials.performance.report import aligned, median, percentile, write_json
from tutorials.performance.serving import Process, free_port

ROUTERS = ("RoundRobin", "LeastLoaded", "PrefixAffinity")
TURNS = 6
QUESTION = 150  # tokens
ANSWER = 20
THINK = 0.3  # seconds, in the mean
BLOCKS = 1200  # of 16 tokens, in each replica: room for half of the conversations and a bit


async def talk(client: httpx.AsyncClient, user: int, seed: int) -> list[dict]:
    """The turns of one user: prompt tokens, those of them that were cached, seconds to the first
    token."""
    rng = random.Random(f"{user} {seed}")
    history: list[int] = []
    turns = []
    await asyncio.sleep(rng.expovariate(1) * THINK)
    for _ in range(TURNS):
        history += [rng.randrange(1000) for _ in range(QUESTION)]
        turns.append(await ask(client, history))
        history += turns[-1].pop("token_ids")
        await asyncio.sleep(rng.expovariate(1) * THINK)
    return turns


async def ask(client: httpx.AsyncClient, history: list[int]) -> dict:
    """The answer's tokens are made up, so that the load is the same with every router."""
    body = {
        "prompt": history,
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
        "token_ids": [7] * ANSWER,
    }


async def load(url: str, num_users: int, seed: int) -> dict:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(ask(client, [user] * 5) for user in range(8)))  # warms up
        begin = time.perf_counter()
        users = await asyncio.gather(*(talk(client, user, seed) for user in range(num_users)))
        seconds = time.perf_counter() - begin
    turns = [turn for user in users for turn in user]
    ttfts = [turn["ttft"] for turn in turns]
    return {
        "hit_rate": sum(turn["cached"] for turn in turns) / sum(turn["prompt"] for turn in turns),
        "ttft_ms": {f"p{q}": 1e3 * percentile(ttfts, q) for q in (50, 90, 99)},
        "turns_per_second": len(turns) / seconds,
    }


def measure(name: str, num_users: int, seed: int) -> dict:
    port = free_port()
    options = (
        f"--replicas 2 --router-cls nanovllm.router:{name} --num-blocks {BLOCKS} --port {port}"
    )
    with Process("nanovllm", "serve", *options.split(), port=port) as server:
        wait_until_healthy(server)
        return asyncio.run(load(server.url, num_users, seed))


def wait_until_healthy(server: Process) -> None:
    while server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise ValueError("the server has ended")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    import torch

    runs: dict[str, list[dict]] = {name: [] for name in ROUTERS}
    assert all(hasattr(router, name) for name in ROUTERS)
    for seed in range(args.rounds):
        for name in ROUTERS:
            runs[name].append(measure(name, args.users, seed))
            print(name, runs[name][-1], flush=True)
    report = environment() | {
        "device": device_name(torch.device("cpu"), threads=1),
        "versions": installed("torch", "ray"),
        "users": args.users,
        "turns": TURNS,
        "runs": {name: median(ones) for name, ones in runs.items()},
    }
    rows = [["", "hits", "TTFT p50", "p90", "p99 (ms)", "turns/s"]]
    for name, run in report["runs"].items():
        times = [f"{run['ttft_ms'][q]:.0f}" for q in ("p50", "p90", "p99")]
        rows.append([name, f"{run['hit_rate']:.0%}", *times, f"{run['turns_per_second']:.1f}"])
    print(aligned(rows))
    if args.json:
        write_json(report, args.json)


if __name__ == "__main__":
    main()
