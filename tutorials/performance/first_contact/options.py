"""Section 7: what some users ask for: penalties, streams, mapped memory, ranks; and what a failed
step leaves behind."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from nanovllm import LLM, SamplingParams
from nanovllm.frontend.streaming import Reader
from nanovllm.vattention.memory import HostMemory
from tutorials.performance.first_contact.decode_step import leave, phases, wall_time
from tutorials.performance.first_contact.engine import generate, token_ids
from tutorials.performance.first_contact.job import PACKAGE
from tutorials.performance.first_contact.section import Section, run
from tutorials.performance.first_contact.start import (
    begin_decodes,
    new_llm,
    random_prompts,
    watch,
)

KINDS: dict[str, dict] = {  # parameters of the requests
    "plain": {},
    "repetition_penalty 1.05": {"repetition_penalty": 1.05},
    "streamed": {},
}
PAGE_CALLS = "cuMemCreate cuMemAddressReserve cuMemMap cuMemUnmap cuMemSetAccess".split()
Seconds = dict[str, list[float]]  # of each call, by the function's name


def options(section: Section) -> None:
    """Steps with penalties and with streams, an answer after a failed step, vAttention, a rank."""
    of_one_engine(section)
    section.case("vAttention", partial(mapped, section))
    section.case("one rank", partial(one_rank, section))
    show(section)


def show(section: Section) -> None:
    kinds = {kind: section.cases.get(kind, {}) for kind in KINDS}
    columns = [(name, ",.3f") for name in ("ms", "launch_ms", "deliver_ms")]
    columns += [("tokens_per_second", ",.0f")]
    section.show("decodes|ms|launch|deliver|tokens/s", columns, kinds)
    for when in ("start", "step"):
        calls = section.cases.get("vAttention", {}).get(f"calls_of_{when}", {})
        header = f"calls of vAttention's {when}|calls|ms"
        section.show(header, [("calls", ",.1f"), ("ms", ",.3f")], calls)
    ranks = section.cases.get("one rank", {}).get("report", {})
    section.show("ranks|start s|ms", [("start_seconds", ",.1f"), ("ms", ",.3f")], ranks)
    for name in ("a failed step", "vAttention"):
        print(f"{name}:", section.cases.get(name), flush=True)


def of_one_engine(section: Section) -> None:
    """The cases of one engine, which is gone afterwards."""
    made: list[LLM] = []

    def start() -> dict:
        llm, facts = new_llm(section, dtype=section.dtype_name, **options_of(section))
        llm.tokenizer = SimpleNamespace(backend_tokenizer=words(llm.runner.vocab_size))
        made.append(llm)
        return facts

    section.case("start", start)
    if not made:
        return
    (llm,) = made
    for name, params in KINDS.items():
        section.case(name, partial(decodes, section, llm, params, name == "streamed"))
    section.case("a failed step", partial(answer_after_failure, section, llm))


def options_of(section: Section) -> dict:
    """Without a prefix cache: the same prompts are computed again, in the same steps."""
    options = {"attention_backend": "triton", "enable_prefix_caching": False}
    return options | {"max_model_len": 4096} | section.sizes.options


def words(vocab_size: int) -> Tokenizer:
    """A tokenizer for the random weights, which have none: each token is a number."""
    return Tokenizer(WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))


def decodes(section: Section, llm: LLM, params: dict, is_streamed: bool) -> dict:
    """Median milliseconds of a step of all sequences, and of the host in it. Streams are read as the
    server reads them: while the device computes the next step."""
    sizes = section.sizes
    leave(llm, 0)  # none, unless the case before has failed
    num_tokens = 2 * sizes.steps + 100  # those that come first go on while others begin
    all_params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
    prompts = random_prompts(llm, sizes.batch, sizes.context * 3 // 2)
    replies = begin_decodes(llm, prompts, all_params, is_reported=False)
    readers = [Reader(reply) for reply in replies if is_streamed]
    step = partial(llm.step, report=False)
    llm.meanwhile.append(lambda: [reader.news() for reader in readers])
    try:
        ms = wall_time(step, sizes.steps)["ms_p50"]
        host = phases(llm, step, sizes.steps)
    finally:
        llm.meanwhile.pop()
    num_left = len(llm.requests)
    leave(llm, 0)
    if num_left != sizes.batch:
        raise RuntimeError(f"{num_left} of {sizes.batch} sequences were measured")
    return {
        "ms": ms,
        "tokens_per_second": 1000 * sizes.batch / ms,
        "launch_ms": host["launch"],
        "deliver_ms": host["_deliver"],
    }


def answer_after_failure(section: Section, llm: LLM) -> dict:
    """A step fails once: its requests are answered all the same, and later ones as before."""
    leave(llm, 0)
    facts: dict[str, Any] = {}
    answer = partial(generate, section, llm, facts, 4)
    before = token_ids(answer())
    with mock.patch.object(llm.runner, "sample", failing_once(llm.runner.sample)):
        meanwhile = token_ids(answer())
    after = token_ids(answer())
    facts["failed_steps"] = llm.stats()["failed_steps"]
    # those that began anew were computed in other chunks, which round differently
    facts["same_meanwhile"] = sum(one == other for one, other in zip(before, meanwhile))
    facts["same"] = sum(one == other for one, other in zip(before, after))
    if facts["failed_steps"] == 0:
        facts["error"] = "no step has failed"
    elif any(len(tokens) != 4 for tokens in meanwhile):
        facts["error"] = "the requests of the failed step were not answered"
    elif after != before:
        facts["error"] = f"{facts['same']} of {len(before)} answers are as before"
    return facts


def failing_once(call: Callable) -> Callable:
    """The function, whose third call raises: after the prompts and a decode."""
    calls = count()

    def failing(*args):
        if next(calls) == 2:
            raise RuntimeError("this step was made to fail")
        return call(*args)

    return failing


# --- vAttention ---


def mapped(section: Section) -> dict:
    """Seconds of a start with mapped memory, milliseconds of a step, and the calls that map pages.

    With as many rows as an engine has by default.
    """
    num_seqs, num_tokens = section.sizes.greedy
    options = {"max_model_len": 4096} | section.sizes.options | {"num_blocks": 2000}
    with page_calls(section) as seconds:
        backend = {"dtype": section.dtype_name, "attention_backend": "vattention"}
        llm, facts = new_llm(section, **backend, **options)
        facts["calls_of_start"] = summary(seconds)
        params = SamplingParams(max_tokens=section.sizes.steps + 60, ignore_eos=True)
        begin_decodes(llm, random_prompts(llm, num_seqs, 4 * num_tokens), params)
        seconds_before = {name: len(values) for name, values in seconds.items()}
        facts["step"] = wall_time(partial(llm.step, report=False), section.sizes.steps)
        of_steps = {name: values[seconds_before[name] :] for name, values in seconds.items()}
    facts["calls_of_step"] = summary(of_steps, section.sizes.steps)
    return facts


@contextmanager
def page_calls(section: Section) -> Iterator[Seconds]:
    """Notes each call that maps pages: of the GPU's driver, or, with --cpu, of the host's memory."""
    owner: Any = HostMemory
    names = ["reserve", "map", "unmap"]
    if not section.cpu:
        from cuda.bindings import driver

        owner = driver
        names = PAGE_CALLS
    seconds: Seconds = {name: [] for name in names}
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(watch(owner, name, seconds[name]))
        yield seconds


def summary(seconds: Seconds, steps: int = 1) -> dict[str, dict]:
    """Calls and milliseconds per step."""
    found = {}
    for name, values in seconds.items():
        found[name] = {"calls": len(values) / steps, "ms": 1000 * sum(values) / steps}
    return found


# --- ranks ---


def one_rank(section: Section) -> dict:
    """In a program of its own: what hangs in a collective is ended by the clock."""
    file = section.folder / "one_rank.json"
    program = [sys.executable, "-m", f"{PACKAGE}.one_rank"]
    device = "cpu" if section.cpu else "cuda:0"
    result = run([*program, section.model(), device, str(file)], section.seconds_left())
    return result | {"report": json.loads(file.read_text())} if result["status"] == 0 else result
