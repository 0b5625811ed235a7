"""Several devices in the simulator: ranks, replicas and routers. The numbers of chapter 19.

    python -m measure.replicas --trace AzureLLMInferenceTrace_conv.csv \
        --json tutorials/results/replicas.json

- ranks: Qwen3-32B on one to eight H100, by NVLink, PCIe and a network: one user alone, and
  as many tokens per second as possible.
- shapes: sixteen H100 as 16, 8, 4 or 2 replicas, at rising rates.
- routers: conversations, documents that many ask about, and the recorded trace.
- bounds: PrefixAffinity with other values of `most_ahead`, where any part of a prompt counts.
- least_shares: PrefixAffinity with other values of `least_share`.
- day: how long a day of a million requests takes here, from the first ones (only with --day).
"""

import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from nanovllm.config import Config
from nanovllm.routing import LeastLoaded, PrefixAffinity, RoundRobin, Router
from nanovllm.simulator import simulate
from nanovllm.simulator.cost_model import LINKS
from nanovllm.simulator.jobs import Job, Run
from nanovllm.simulator.machines import MACHINES
from tutorials.arguments import experiment
from tutorials.machine import device_name, environment, peak_bytes
from tutorials.report import aligned, rows_of, write_json
from tutorials.simulation.metrics import distribution, tpot, ttft
from tutorials.simulation.workloads import (
    all_at_once,
    azure,
    fixed,
    lognormal,
    multi_turn,
    poisson,
    shared_prefix,
    sharegpt,
    workload,
)

ROUTERS: dict[str, type[Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "prefix affinity": PrefixAffinity,
}


def numbers(run: Run) -> dict:
    first = distribution(map(ttft, run.requests))
    later = distribution(map(tpot, run.requests))
    num_outputs = sum(len(request.token_times) for request in run.requests)
    shares = [0] * max(1, len(run.replicas))
    for request in run.requests:
        shares[request.replica] += 1
    return {
        "ttft_ms": {name: 1e3 * (first[name] or 0) for name in ("mean", "p50", "p99")},
        "tpot_ms": {name: 1e3 * (later[name] or 0) for name in ("p50", "p99")},
        "tokens_per_second": num_outputs / run.seconds,
        "hit_rate": run.num_cached_tokens / run.num_prompt_tokens,
        "preemptions": run.num_preemptions,
        "most_requests": max(shares) * len(shares) / len(run.requests),  # 1: all serve as many
    }


def ranks() -> dict:
    alone = workload(islice(range(0, 10**6, 100), 20), lognormal(1000, 200, 0.5), 20)
    crowd = workload(all_at_once(), sharegpt(), 2000)
    found = {}
    for link in LINKS:
        machine = replace(MACHINES["h100"], link=LINKS[link])
        for num_ranks in (1, 2, 4, 8):
            if num_ranks == 1 and link != "nvlink":
                continue
            config = Config(model="qwen3-32b", tensor_parallel_size=num_ranks)
            one, many = (numbers(simulate(jobs, config, machine)) for jobs in (alone, crowd))
            found[f"{num_ranks} {link}"] = {
                "ttft_ms": one["ttft_ms"]["p50"],
                "tpot_ms": one["tpot_ms"]["p50"],
                "tokens_per_second": many["tokens_per_second"],
                "per_device": many["tokens_per_second"] / num_ranks,
                "preemptions": many["preemptions"],
            }
    return found


def shapes(trace: Path) -> dict:
    found = {}
    for rate, count in ((8, 1500), (64, 3000), (160, 6000)):
        jobs = azure(trace, count, rate=rate)
        for num_ranks in (1, 2, 4, 8):
            config = Config(
                model="qwen3-32b",
                tensor_parallel_size=num_ranks,
                max_num_seqs=1024,  # so that no request waits for a seat
            )
            run = simulate(jobs, config, replicas=16 // num_ranks, router_cls=LeastLoaded)
            found[f"{rate} {16 // num_ranks}"] = numbers(run)
    return found


def conversations(rate: float, count: int = 800) -> list[Job]:
    lengths = lognormal(150, 150, 0.8)
    return multi_turn(poisson(rate), lengths, count, turns=8, think=8, system_tokens=500)


def documents(rate: float, count: int = 2000) -> list[Job]:
    lengths = lognormal(60, 60, 0.6)
    return shared_prefix(poisson(rate), lengths, count, num_prefixes=60, prefix_tokens=3000)


def begins(num_shared: int, rate: float, count: int = 1000) -> list[Job]:
    """What all share is the smaller part of a prompt."""
    lengths = lognormal(800, 300, 0.5)
    return shared_prefix(poisson(rate), lengths, count, num_prefixes=1, prefix_tokens=num_shared)


def routers(trace: Path) -> dict:
    config = Config(model="qwen3-8b", num_blocks=8000, max_model_len=8192)
    loads = {
        "conversations": conversations(rate=6),
        "documents": documents(rate=60),
        "azure": azure(trace, 4000, rate=40),
    }
    return {
        f"{load}, {name}": numbers(simulate(jobs, config, replicas=4, router_cls=cls))
        for load, jobs in loads.items()
        for name, cls in ROUTERS.items()
    }


def bounds() -> dict:
    config = Config(model="qwen3-8b", num_blocks=8000, max_model_len=8192)
    loads = {"conversations": conversations(rate=6), "documents": documents(rate=60)}
    found = {}
    for load, jobs in loads.items():
        for most in (0, 2, 4, 8, 16, 32, 10**9):
            fields = {"most_ahead": most, "least_share": 0}
            cls = type("Bounded", (PrefixAffinity,), fields)
            found[f"{load} {most}"] = numbers(simulate(jobs, config, replicas=4, router_cls=cls))
    return found


def least_shares() -> dict:
    config = Config(model="qwen3-8b", num_blocks=8000, max_model_len=8192)
    loads = {
        "templates": begins(64, rate=4),
        "instructions": begins(300, rate=4),
        "conversations": conversations(rate=6),
    }
    found = {}
    for load, jobs in loads.items():
        for share in (0, 0.1, 0.25, 0.5, 0.75, 0.9):
            cls = type("Shared", (PrefixAffinity,), {"least_share": share})
            found[f"{load} {share}"] = numbers(simulate(jobs, config, replicas=4, router_cls=cls))
    return found


def day(count: int) -> dict:
    """How long the simulator needs for the first requests of a day with a million, on 64 replicas.
    They are like requests to a service for programmers (medians of Splitwise, ISCA 2024, figure 3): long
    prompts, short answers. With answers of 129 tokens, as in chats, there are ten times as many steps."""
    jobs = workload(poisson(10**6 / 86_400), fixed(1500, 13), count)
    begin = time.process_time()
    run = simulate(jobs, Config(model="qwen3-8b"), replicas=64)
    seconds = time.process_time() - begin
    return {
        "requests": count,
        "simulated_hours": run.seconds / 3600,
        "steps": run.num_steps,
        "processor_seconds": seconds,
        "us_per_step": 1e6 * seconds / run.num_steps,
        "minutes_for_a_million": 1e6 * seconds / count / 60,
        "peak_gigabytes": peak_bytes() / 1e9,
    }


LINK_NAMES = {"nvlink": "NVLink", "pcie": "PCIe", "network": "network"}
FIRST = [("ttft_ms.p50", ",.0f"), ("ttft_ms.p99", ",.0f")]
FIRST_AND_LATER = [*FIRST, ("tpot_ms.p50", ".1f"), ("tpot_ms.p99", ".1f")]
TIMES = "TTFT p50 (ms)|p99|per token p50 (ms)|p99"
BUSIEST = ("most_requests", ".0%", 1 / 4)  # of 4 replicas


def rank_rows(report: dict) -> list[list[str]]:
    """Qwen3-32B on one to eight devices, one user alone and as many as possible."""

    def label(name: str) -> list[str]:
        num_ranks, link = name.split()
        return [num_ranks, "-" if num_ranks == "1" else LINK_NAMES[link]]

    header = "H100s|link|alone: TTFT (ms)|per token|full: tokens/s|of each H100|preempted"
    columns = [("ttft_ms", ".0f"), ("tpot_ms", ".1f")]
    columns += [("tokens_per_second", ",.0f"), ("per_device", ",.0f"), ("preemptions", "")]
    return rows_of(header, columns, report["ranks"], label)


def shape_rows(report: dict) -> list[list[str]]:
    """Sixteen devices as many small replicas or few large ones."""

    def label(name: str) -> list[str]:
        rate, count = name.split()
        return [rate, count, str(16 // int(count))]

    header = f"requests/s|replicas|H100s of each|{TIMES}"
    return rows_of(header, FIRST_AND_LATER, report["shapes"], label)


def router_rows(report: dict) -> list[list[str]]:
    """Three loads and three routers, on four replicas."""
    columns = [("hit_rate", ".0%"), *FIRST_AND_LATER]
    return rows_of(f"load, router|hits|{TIMES}", columns, report["routers"])


def bound_rows(report: dict) -> list[list[str]]:
    """How far a replica may be ahead of the others."""
    header = "load, `most_ahead`|hits|TTFT p50 (ms)|p99|busiest of 4 serves"
    columns = [("hit_rate", ".0%"), *FIRST, BUSIEST]
    label = lambda name: [name.replace(" 1000000000", " no bound").replace(" ", ", ", 1)]  # noqa: E731
    return rows_of(header, columns, report["bounds"], label)


def share_rows(report: dict) -> list[list[str]]:
    """How much of a prompt a replica must hold to be chosen for it."""
    columns = [("hit_rate", ".0%"), *FIRST_AND_LATER, BUSIEST]
    header = f"load, `least_share`|hits|{TIMES}|busiest of 4 serves"
    label = lambda name: [name.replace(" ", ", ")]  # noqa: E731
    return rows_of(header, columns, report["least_shares"], label)


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="the conversations of Azure 2023")
    parser.add_argument("--day", type=int, help="this one only, with so many requests of a day")
    args = parser.parse_args()
    import torch  # only here: the simulator itself needs none of its memory

    report = environment() | {"device": device_name(torch.device("cpu"), threads=1)}
    if args.day:
        report["day"] = day(args.day)
        print(report["day"])
    studies = (
        ("ranks", ranks, rank_rows),
        ("shapes", lambda: shapes(args.trace), shape_rows),
        ("routers", lambda: routers(args.trace), router_rows),
        ("bounds", bounds, bound_rows),
        ("least_shares", least_shares, share_rows),
    )
    for name, study, rows in () if args.day else studies:
        report[name] = study()
        print(aligned(rows(report)), flush=True)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
