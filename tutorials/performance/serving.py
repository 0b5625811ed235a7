"""Servers under load: ours, the naive one of chapter 17, and any that has OpenAI's API.

    python -m tutorials.performance.serving --json tutorials/results/cpu_serving.json
    python -m tutorials.performance.serving --url vllm=http://127.0.0.1:8001
    python -m tutorials.performance.serving --experiments together --random-weights qwen3-0.6b

Five experiments, all with real sockets, the clients in this process and each server in one of its
own; in every round all take turns.

- eight: eight clients at the same time.
- together: 64 streams at once beside `LLM.generate` with the same prompts.
- load: Poisson arrivals at rising rates; a server that has fallen behind is not asked for more.
- loop: how late the event loop of our server is at these rates, and how long it computes without a
  pause. A process that does nothing is as late as the operating system lets it be.
- overload: more requests than can be answered, with a bound for waiting requests and without.
"""

import argparse
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import EMBEDDED_MODEL
from nanovllm.simulator.cost_model import SHAPES
from tutorials.arguments import experiment
from tutorials.machine import ROOT, device_name, environment, installed
from tutorials.performance.checkpoints import model_directory
from tutorials.performance.clients import Answer, Target, ask, at_once, at_rate, first_model
from tutorials.performance.watch import serve_watch
from tutorials.report import aligned, median, percentile, rows_of, write_json

TOGETHER = 64
BEHIND = 2.0  # seconds until the first token of half of the requests: too much to go on
OVERLOAD = {"num_seqs": 32, "bounded": 32, "unbounded": 10**6}
EXPERIMENTS = ("eight", "together", "load", "loop", "overload")
WORKER = ("tutorials.performance.serving", "worker")


class Process:
    """A worker of this file, or the naive server, until `close`."""

    def __init__(self, *command: str, port: int = 0):
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.communicate()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(url: str, seconds: float = 120) -> None:
    """Until a server listens."""
    port = int(url.rpartition(":")[2])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise ValueError(f"{url} does not listen")


def our_server(model: str, max_waiting: int = 256, num_seqs: int = 256) -> Process:
    port = free_port()
    options = map(str, (model, port, max_waiting, num_seqs))
    return Process(*WORKER, "serve", *options, port=port)


def naive_server() -> Process:
    port = free_port()
    return Process("tutorials.serving.naive_server", str(port), port=port)


# --- in the workers' processes ---


def work(kind: str, *args: str) -> None:
    if kind == "serve":
        model, *numbers = args
        work_as_server(model, *map(int, numbers))
    elif kind == "engine":
        work_as_engine(*args)
    else:
        asyncio.run(serve_watch())


def work_as_engine(model: str) -> None:
    """Answers each line "clients tokens" with the seconds that `generate` took."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(model)
    target = Target("", has_tokenizer=llm.tokenizer is not None)
    for line in sys.stdin:
        num_clients, num_tokens = map(int, line.split())
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        prompts = [target.prompt(i) for i in range(num_clients)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - begin, flush=True)


def work_as_server(model: str, port: int, max_waiting: int, num_seqs: int) -> None:
    """Our server, with a watch in its loop."""
    from nanovllm import LLM
    from nanovllm.server.app import new_app
    from nanovllm.server.serve import bind, new_server
    from nanovllm.server.settings import ServerOptions

    options = ServerOptions(
        served_model_name=["measured"],
        max_waiting=max_waiting,
        drain_seconds=0,
        log_requests=False,
    )
    server = new_server(new_app(LLM(model, max_num_seqs=num_seqs), options))
    startup = server.startup
    tasks = []  # the loop itself would forget them

    async def start(sockets=None) -> None:
        await startup(sockets)
        tasks.append(asyncio.create_task(serve_watch()))

    server.startup = start  # type: ignore[method-assign]
    logging.disable(logging.INFO)

    server.run(sockets=[bind("127.0.0.1", port)])


# --- here ---


def watched(ours: Process, idler: Process, work: Callable[[], object]) -> dict:
    """Of our loop and of the idle process, while something is done."""
    for process in (ours, idler):
        process.ask("begin")
    work()
    numbers = json.loads(ours.ask("end"))
    idle = json.loads(idler.ask("end"))
    return numbers | {f"idler_{name}": idle[name] for name in ("late_p99", "late_most")}


def numbers_of(answers: list[Answer]) -> dict:
    good = [answer for answer in answers if answer.status == 200 and answer.times]
    numbers = {
        "requests": len(answers),
        "refused": sum(answer.status == 429 for answer in answers),
        "failed": sum(answer.status not in (200, 429) for answer in answers),
    }
    if not good:
        return numbers
    begin = min(answer.begin for answer in good)
    seconds = max(answer.end for answer in good) - begin
    numbers["seconds"] = seconds
    numbers["output_tokens_per_second"] = sum(answer.num_tokens for answer in good) / seconds
    lists = {
        "ttft": [answer.ttft for answer in good],
        "latency": [answer.end - answer.begin for answer in good],
        "gap": [gap for answer in good for gap in answer.gaps],
    }
    for name, values in lists.items():
        if values:
            numbers |= {f"{name}_p{q}": percentile(values, q) for q in (50, 99)}
    return numbers


def spread(runs: list[dict], name: str) -> list[float]:
    values = [run[name] for run in runs]
    return [min(values), max(values)]


def eight(targets: dict[str, Target], args) -> dict:
    """Also when each client saw its first text, the one that waited least first."""
    runs: dict[str, list[dict]] = {name: [] for name in targets}
    for _ in range(args.repeat):
        for name, target in targets.items():
            answers = asyncio.run(at_once(target, 8, args.tokens))
            firsts = sorted(answer.ttft for answer in answers)
            places = {f"first_{i}": first for i, first in enumerate(firsts)}
            runs[name].append(numbers_of(answers) | places)
    medians = {name: median(some) for name, some in runs.items()}
    for numbers in medians.values():
        numbers["firsts"] = [numbers.pop(f"first_{i}") for i in range(8)]
    return medians


def together(targets: dict[str, Target], engine: Process, args) -> dict:
    """64 at once: streams of each server, answers of ours that are not streamed, and generate."""
    plain = replace(targets["nanovllm"], is_streamed=False)
    kinds = {f"{name}, streams": target for name, target in targets.items() if target.is_streamed}
    kinds["nanovllm, no streams"] = plain
    runs: dict[str, list[dict]] = {name: [] for name in ["LLM.generate", *kinds]}
    num_tokens = 2 * args.tokens
    for i in range(args.repeat + 1):  # the first round is to warm up
        seconds = float(engine.ask(f"{TOGETHER} {num_tokens}"))
        speed = TOGETHER * num_tokens / seconds
        numbers = {"seconds": seconds, "output_tokens_per_second": speed, "of_generate": 1.0}
        runs["LLM.generate"].append(numbers)
        for name, target in kinds.items():
            numbers = numbers_of(asyncio.run(at_once(target, TOGETHER, num_tokens)))
            numbers["of_generate"] = numbers["output_tokens_per_second"] / speed
            runs[name].append(numbers)
        if i == 0:
            runs = {name: [] for name in runs}
    return {
        name: median(some) | {"range": spread(some, "output_tokens_per_second")}
        for name, some in runs.items()
    }


def load(targets: dict[str, Target], args) -> dict:
    """Without the rates that a server did not reach in every round."""
    runs: dict[str, dict[float, list[dict]]] = {name: {} for name in targets}
    for i in range(args.repeat):
        behind: set[str] = set()
        for rate in args.rates:
            for name, target in targets.items():
                if name in behind:
                    continue
                answers = asyncio.run(at_rate(target, rate, args.seconds, args.tokens, seed=i))
                numbers = numbers_of(answers)
                runs[name].setdefault(rate, []).append(numbers)
                if numbers.get("ttft_p50", BEHIND) >= BEHIND:
                    behind.add(name)
                print(line_of(name, rate, numbers), flush=True)
    return {
        name: [
            {"rate": rate, **median(some)}
            for rate, some in by_rate.items()
            if len(some) == args.repeat
        ]
        for name, by_rate in runs.items()
    }


def event_loop(target: Target, ours: Process, args) -> dict:
    """Without load, at each rate, and with 64 at once."""
    works: dict[str, Callable[[], object]] = {"0": lambda: time.sleep(args.seconds)}
    for rate in args.rates:
        asked = (target, rate, args.seconds, args.tokens, 0)
        works[f"{rate:g}"] = partial(run_async, at_rate, *asked)
    works[f"{TOGETHER} at once"] = partial(run_async, at_once, target, TOGETHER, 2 * args.tokens)
    runs: dict[str, list[dict]] = {name: [] for name in works}
    with Process(*WORKER, "idle") as idler:
        for _ in range(args.repeat):
            for name, work in works.items():
                runs[name].append(watched(ours, idler, work))
    return {name: median(some) for name, some in runs.items()}


def run_async(function: Callable[..., Any], *args) -> object:
    return asyncio.run(function(*args))


def overload(model: str, args) -> dict:
    """Requests come at the highest rate of `load`; a server has few seats."""
    rate = args.rates[-1]
    runs: dict[str, list[dict]] = {}
    for i in range(args.repeat):
        for name in ("unbounded", "bounded"):
            with our_server(model, OVERLOAD[name], OVERLOAD["num_seqs"]) as server:
                wait_for(server.url)
                target = Target(server.url, first_model(server.url))
                asyncio.run(ask(target, 0, args.tokens))
                answers = asyncio.run(at_rate(target, rate, args.seconds, args.tokens, seed=i))
            runs.setdefault(name, []).append(numbers_of(answers))
            print(line_of(name, rate, runs[name][-1]), flush=True)
    return {"rate": rate, **OVERLOAD, "runs": {name: median(some) for name, some in runs.items()}}


def line_of(name: str, rate: float, numbers: dict) -> str:
    cells = [
        name,
        f"{rate:g}/s",
        f"{numbers['requests']} requests",
        f"{numbers['refused']} refused",
    ]
    if "ttft_p50" in numbers:
        cells.append(
            f"TTFT {1e3 * numbers['ttft_p50']:,.0f} ms, p99 {1e3 * numbers['ttft_p99']:,.0f}"
        )
        cells.append(f"{numbers['output_tokens_per_second']:,.0f} tokens/s")
    return ", ".join(cells)


def measure(args) -> dict:
    import torch

    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of all workers
    report = environment() | {"device": device_name(torch.device("cpu"), args.threads)}
    names = ("torch", "fastapi", "uvicorn", "httptools")
    report["versions"] = {name: installed(name) for name in names}
    report |= {"tokens": args.tokens, "seconds": args.seconds, "repeat": args.repeat}
    directory = model_directory(args)
    model = str(directory)
    has_tokenizer = (directory / "tokenizer.json").exists()
    report["model"] = directory.name
    with ExitStack() as stack:
        ours = stack.enter_context(our_server(model))
        wait_for(ours.url)
        targets = {"nanovllm": Target(ours.url, first_model(ours.url), True, has_tokenizer)}
        for name, url in args.url:
            url = url.rstrip("/").removesuffix("/v1")
            targets[name] = Target(url, first_model(url), True, has_tokenizer)
        if model == EMBEDDED_MODEL:
            naive = stack.enter_context(naive_server())
            wait_for(naive.url)
            targets["naive"] = Target(naive.url, is_streamed=False)
        report["servers"] = {name: version_of(target.url) for name, target in targets.items()}
        for target in targets.values():  # to warm up
            asyncio.run(ask(target, 0, args.tokens))
        if "eight" in args.experiments:
            report["eight"] = eight(targets, args)
        if "together" in args.experiments:
            engine = stack.enter_context(Process(*WORKER, "engine", model))
            report["together"] = together(targets, engine, args)
        if "load" in args.experiments:
            report["load"] = load(targets, args)
        if "loop" in args.experiments:
            report["loop"] = event_loop(targets["nanovllm"], ours, args)
    if "overload" in args.experiments:
        report["overload"] = overload(model, args)
    return report


# --- tables ---


def eight_rows(report: dict) -> list[list[str]]:
    """When each of eight clients sees its first text."""
    header = "ms until the first text|1st client|4th|8th|all answers (s)|tokens/s"
    found = dict(sorted(report["eight"].items(), key=lambda item: item[0] != "naive"))
    records = {
        name: run | {str(i): run["firsts"][i] for i in (0, 3, 7)} for name, run in found.items()
    }
    columns = [(i, ",.0f", 1e3) for i in "037"]
    columns += [("seconds", ".2f"), ("output_tokens_per_second", ",.0f")]
    return rows_of(header, columns, records)


def load_rows(report: dict) -> list[list[str]]:
    """Latency at rising rates."""
    header = "requests per second|server|TTFT p50 (ms)|p99|between tokens p50 (ms)|p99|tokens/s"
    names = sorted(report["load"], key=["nanovllm", "vllm", "naive"].index)
    records = {}
    for rate in [row["rate"] for row in report["load"]["nanovllm"]]:
        for name in names:
            for row in report["load"][name]:
                if row["rate"] == rate:
                    records[f"{rate:g} {name}"] = row
    columns = [(f"{key}_{q}", ",.0f", 1e3) for key in ("ttft", "gap") for q in ("p50", "p99")]
    columns.append(("output_tokens_per_second", ",.0f"))
    return rows_of(header, columns, records, str.split)


def loop_rows(report: dict) -> list[list[str]]:
    """How late the event loop is, and what of it is its own work."""
    header = "requests per second|loop late: p99 (ms)|most"
    header += "|idle process late: p99|most|loop busy: p99|most"
    kinds = ("late", "idler_late", "busy")
    columns = [(f"{kind}_{which}", ".1f", 1e3) for kind in kinds for which in ("p99", "most")]
    return rows_of(header, columns, report["loop"])


def overload_rows(report: dict) -> list[list[str]]:
    """A queue without a bound, and with one."""
    found = report["overload"]
    names = {"no bound": "unbounded", f"at most {found['bounded']} wait": "bounded"}
    records = {}
    for text, name in names.items():
        run = found["runs"][name]
        records[text] = run | {"share": run["refused"] / run["requests"]}
    columns = [("share", ".0%"), ("ttft_p50", ".1f"), ("ttft_p99", ".1f")]
    columns.append(("output_tokens_per_second", ",.0f"))
    header = f"{found['rate']:g} requests per second|refused|TTFT p50 (s)|p99|tokens/s"
    return rows_of(header, columns, records)


def together_rows(report: dict) -> list[list[str]]:
    """64 requests at once, through servers and without one."""
    records = {}
    for name, run in report["together"].items():
        low, high = run["range"]
        speed = f"{run['output_tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})"
        records[name] = run | {"speed": speed}
    columns = [("speed", ""), ("of_generate", ".0%")]
    return rows_of("64 requests at once|tokens/s|of generate's", columns, records)


TABLES = {  # of the experiments
    "eight": eight_rows,
    "together": together_rows,
    "load": load_rows,
    "loop": loop_rows,
    "overload": overload_rows,
}


def version_of(url: str) -> str | None:
    """None for a server that does not tell."""
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=10) as response:
            return json.load(response)["version"]
    except urllib.error.HTTPError:
        return None


def named_url(text: str) -> tuple[str, str]:
    name, sign, url = text.partition("=")
    if not sign or not url.startswith("http"):
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=http://HOST:PORT")
    return name, url


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        work(*sys.argv[2:])
        return
    parser = experiment(__doc__)
    parser.add_argument("--model", help="hub id or directory; default: the embedded one")
    parser.add_argument("--random-weights", choices=SHAPES, help="a real shape")
    parser.add_argument("--weights-dir", type=Path, default=Path("~/.cache/nanovllm-bench"))
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument("--url", type=named_url, action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=8, help="of arrivals, per rate")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="that compute, per server")
    args = parser.parse_args()
    report = measure(args)
    for name in args.experiments:
        print(aligned(TABLES[name](report)), end="\n\n")
    write_json(report, args.json)


if __name__ == "__main__":
    main()
