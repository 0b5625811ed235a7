"""Requests for the rungs of the ladder, and runs of the rungs and of the engine on them."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import getsource
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from tutorials.ladder import rung5, rung7
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.rung3 import SEATS

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
    """What a rung reports of a step: each request's tokens; slots held and used."""

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
    """Gives all rungs this number of seats."""
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


def decodes(contexts: list[int], num_blocks: int) -> list[rung5.Sequence]:
    """Sequences of rung 5 with these numbers of tokens, in blocks in no order. Each lacks its last token."""
    rng = random.Random(0)
    free = rng.sample(range(num_blocks), num_blocks)
    sequences = []
    for context in contexts:
        prompt = [rng.randrange(1500) for _ in range(context)]
        seq = rung5.Sequence(Request(prompt, max_tokens=1))
        rung5.grow(seq, free)  # blocks for all its tokens
        seq.computed = context - 1
        sequences.append(seq)
    return sequences


@contextmanager
def one_thread() -> Iterator[None]:
    """In so small operations, several threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def run_rung(number: int, model: Qwen3, requests: list[Request]) -> Run:
    rung = RUNGS[number]
    steps: list[Step] = []
    clock = [time.perf_counter()]

    def report(*step) -> None:
        clock.append(time.perf_counter())
        steps.append(Step(*step, seconds=clock[-1] - clock[-2]))

    with one_thread(), torch.inference_mode():
        answers = rung.generate(model, requests, report)
    seconds = time.perf_counter() - clock[0]
    return Run(len(getsource(rung).splitlines()), steps, seconds, answers)


def run_page(num_seats: int, requests: list[Request]) -> Run:
    """Rung 7, with as many blocks as the other rungs."""
    page = rung7.LLM(EMBEDDED_MODEL, max_num_seqs=num_seats)
    with one_thread():
        run = run_engine(page, requests)
    return run._replace(lines=len(getsource(rung7).splitlines()))


def run_engine(llm: Any, requests: list[Request]) -> Run:
    """`llm` is an LLM: the engine's, or that of rung 7."""
    steps: list[Step] = []
    manager, launch = llm.block_manager, llm.runner.launch

    def observed(schedule):
        """Slots held and used while the step runs, as a rung reports them."""
        held = (len(manager.blocks) - len(manager.free_blocks)) * manager.block_size
        planned = {item.seq: item.start + item.num_tokens for item in schedule.items}
        running = [seq for r in llm.scheduler.running for seq in getattr(r, "sequences", [r])]
        used = sum(planned.get(seq, seq.num_computed_tokens) for seq in running)
        computing = [getattr(seq, "request", seq) for seq in planned]
        same = [Request(r.prompt_token_ids, r.params.max_tokens) for r in computing]
        steps.append(Step(same, [item.num_tokens for item in schedule.items], held, used))
        return launch(schedule)

    params = [
        SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        for request in requests
    ]
    prompts = [request.prompt for request in requests]
    options = {"use_tqdm": False} if isinstance(llm, LLM) else {}
    start = time.perf_counter()
    with patch.object(llm.runner, "launch", observed):
        outputs = llm.generate(prompts, params, **options)
    seconds = time.perf_counter() - start
    completions = [getattr(output, "outputs", [output])[0] for output in outputs]
    return Run(0, steps, seconds, [one.token_ids for one in completions])
