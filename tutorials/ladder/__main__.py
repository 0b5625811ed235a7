"""Runs the six rungs of the ladder, and the engine, on the same requests.

python -m tutorials.ladder                               four requests
python -m tutorials.ladder --many                        64; the 20th has a prompt of 513 tokens
python -m tutorials.ladder --seats 3 --draw seats.png    draws who computes in which step
python -m tutorials.ladder --many --json many.json       writes the tokens of each step
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.rung3 import SEATS
from tutorials.machine import device_name, environment
from tutorials.report import aligned, write_json

BOOK = "phone book:\nAda 1234\nBen 5678\nCora 9012\nDaria 3456\n"
QUESTIONS = {  # and how many tokens of the answer are wanted
    "what is 12 + 30?": 6,
    "sort 31, 4, 15": 4,
    BOOK + "what is the number of Cora?": 3,
    "is 97 prime?": 5,
}


RUNGS = {number: import_module(f"tutorials.ladder.rung{number}") for number in range(1, 7)}


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int


class Step(NamedTuple):
    """What a rung reports of a step: who computed how many tokens; slots held and used."""

    requests: list[Request]
    sizes: list[int]
    held: int = 0
    used: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


class Run(NamedTuple):
    """One rung, or the engine, on the requests."""

    lines: int
    steps: list[Step]
    seconds: float
    answers: list[list[int]]


def new_llm(num_seats: int = SEATS) -> LLM:
    return LLM(dtype="float32", device="cpu", num_blocks=64, block_size=16, max_num_seqs=num_seats)


@contextmanager
def seats(number: int) -> Iterator[None]:
    """Gives all rungs so many seats."""
    with ExitStack() as stack:
        for rung in RUNGS.values():
            if hasattr(rung, "SEATS"):
                stack.enter_context(patch.object(rung, "SEATS", number))
        yield


def four_requests(llm: LLM) -> list[Request]:
    """Prompts of 18, 19, 47 and 14 tokens."""
    requests = []
    for question, max_tokens in QUESTIONS.items():
        chat = [{"role": "user", "content": question}]
        requests.append(Request(llm.inputs.request(chat, None).prompt_token_ids, max_tokens))
    return requests


def many_requests() -> list[Request]:
    """64 requests that want 1 to 100 tokens. One has a long prompt."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(64)]
    prompts = [[rng.randrange(1500) for _ in range(rng.randint(4, 30))] for _ in lengths]
    prompts[19] = [rng.randrange(1500) for _ in range(513)]
    return [Request(*pair) for pair in zip(prompts, lengths)]


def run_rung(number: int, model: Qwen3, requests: list[Request]) -> Run:
    rung = RUNGS[number]
    steps: list[Step] = []
    clock = [time.perf_counter()]

    def report(*step) -> None:
        clock.append(time.perf_counter())
        steps.append(Step(*step, seconds=clock[-1] - clock[-2]))

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in so small operations, several threads only wait for each other
    try:
        with torch.inference_mode():
            answers = rung.generate(model, requests, report)
    finally:
        torch.set_num_threads(num_threads)
    seconds = time.perf_counter() - clock[0]
    return Run(len(getsource(rung).splitlines()), steps, seconds, answers)


def run_engine(llm: LLM, requests: list[Request]) -> Run:
    steps: list[Step] = []

    def observe(schedule, seconds: float) -> None:
        blocks = llm.block_manager
        held = blocks.num_used_blocks * blocks.block_size
        used = sum(seq.num_computed_tokens for r in llm.scheduler.running for seq in r.sequences)
        computing = [item.seq.request for item in schedule.items]
        same = [Request(r.prompt_token_ids, r.params.max_tokens) for r in computing]
        steps.append(Step(same, [item.num_tokens for item in schedule.items], held, used))

    llm.observers.append(observe)
    prompts = [request.prompt for request in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        for request in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.observers.remove(observe)
    return Run(0, steps, seconds, [output.outputs[0].token_ids for output in outputs])


def climb(requests: list[Request], llm: LLM | None = None) -> dict[str, Run]:
    """All rungs and the engine, each once before it is measured."""
    llm = llm or new_llm()
    model = Qwen3(EMBEDDED_MODEL)
    calls: dict[str, Callable[[list[Request]], Run]] = {}
    for number in RUNGS:
        calls[f"rung {number}"] = lambda some, number=number: run_rung(number, model, some)
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
    parser.add_argument("--draw", metavar="FILE", type=Path, help="a picture of the first 20 steps")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="how many tokens each step computed"
    )
    args = parser.parse_args()
    if args.draw and find_spec("matplotlib") is None:
        parser.error("--draw needs matplotlib: pip install matplotlib")
    if args.seats < 1:
        parser.error(f"--seats {args.seats} is not allowed: at least 1")
    for file in filter(None, (args.draw, args.json)):  # before a minute of work
        if not file.parent.is_dir():
            parser.error(f"there is no folder {file.parent}")
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
    if args.draw:
        from tutorials.figures.plot_ladder import draw_runs

        draw_runs(runs, requests).savefig(args.draw)


if __name__ == "__main__":
    main()
