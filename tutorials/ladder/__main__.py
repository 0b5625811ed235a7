"""Runs the seven rungs of the ladder, and the engine, on the same requests.

python -m tutorials.ladder                           four requests
python -m tutorials.ladder --seats 3                 with three seats in place of eight
python -m tutorials.ladder --many                    64; the 20th has a prompt of 513 tokens
python -m tutorials.ladder --many --json many.json   writes the tokens of each step
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from nanovllm import LLM
from nanovllm.config import EMBEDDED_MODEL
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.rung3 import SEATS
from tutorials.ladder.runs import (
    RUNGS,
    Request,
    Run,
    four_requests,
    many_requests,
    new_llm,
    run_engine,
    run_page,
    run_rung,
    seats,
)
from tutorials.machine import device_name, environment
from tutorials.report import aligned, write_json


def climb(requests: list[Request], llm: LLM | None = None) -> dict[str, Run]:
    """All rungs and the engine, each once before it is measured."""
    llm = llm or new_llm()
    model = Qwen3(EMBEDDED_MODEL)
    calls: dict[str, Callable[[list[Request]], Run]] = {}
    for number in RUNGS:
        calls[f"rung {number}"] = lambda some, number=number: run_rung(number, model, some)
    num_seats = llm.scheduler.max_num_seqs
    calls["rung 7"] = lambda some: run_page(num_seats, some)
    calls["LLM"] = lambda some: run_engine(llm, some)
    runs = {}
    for name, call in calls.items():
        call(requests[:2])
        llm.reset_prefix_cache()
        runs[name] = call(requests)
    return runs


def rows_of(runs: dict[str, Run]) -> list[list[str]]:
    rows = []
    for name, run in runs.items():
        num_tokens = sum(map(len, run.answers))
        held = sum(step.held for step in run.steps)
        used = sum(step.used for step in run.steps)
        rows.append(
            [
                name,
                str(run.lines or ""),
                f"{len(run.steps):,}",
                f"{sum(step.tokens for step in run.steps):,}",
                f"{num_tokens / run.seconds:,.0f}",
                f"{max(step.held for step in run.steps):,}",
                f"{used / held:.0%}" if held else "",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--many", action="store_true", help="64 requests instead of four")
    parser.add_argument("--seats", type=int, default=SEATS, help=f"how many, {SEATS} by default")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="how many tokens each step computed"
    )
    args = parser.parse_args()
    if args.seats < 1:
        parser.error(f"--seats {args.seats} is not allowed: at least 1")
    if args.json and not args.json.parent.is_dir():  # before a minute of work
        parser.error(f"there is no folder {args.json.parent}")
    llm = new_llm(args.seats)
    requests = many_requests() if args.many else four_requests(llm)
    with seats(args.seats):
        runs = climb(requests, llm)
    assert all(run.answers == runs["LLM"].answers for run in runs.values())
    header = ["", "lines", "steps", "tokens computed", "tokens/s", "slots held, at most", "used"]
    print(aligned([header, *rows_of(runs)]))
    print("The answers are the same.")
    if args.json:
        tokens = {name: [step.tokens for step in run.steps] for name, run in runs.items()}
        device = {"device": device_name(torch.device("cpu"))}
        write_json(environment() | device | {"runs": tokens}, args.json)


if __name__ == "__main__":
    main()
