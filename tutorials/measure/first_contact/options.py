"""What some users ask for: penalties, streams, mapped memory; and what a failed step leaves behind."""

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
from nanovllm.processing.streaming import Reader
from nanovllm.vattention.memory import HostMemory
from tutorials.measure.first_contact.section import Section, run, show
from tutorials.measure.first_contact.start import (
    Watched,
    begin_decodes,
    leave,
    new_llm,
    random_prompts,
    wall_time,
)
from tutorials.report import percentile

KINDS: dict[str, dict] = {  # parameters of the requests
    "plain": {},
    "repetition_penalty 1.05": {"repetition_penalty": 1.05},
    "streamed": {},
}
PAGE_CALLS = "cuMemCreate cuMemAddressReserve cuMemMap cuMemUnmap cuMemSetAccess".split()


def options(section: Section) -> None:
    """Steps with penalties and with streams, an answer after a failed step, and vAttention."""
    of_one_engine(section)
    facts = section.case("vAttention", partial(mapped, section))
    for when in ("start", "step"):
        header = f"calls of vAttention's {when}|calls|ms"
        show(header, [("calls", ",.1f"), ("ms", ",.3f")], facts.get(f"calls_of_{when}", {}))
    print("vAttention:", facts, flush=True)


def of_one_engine(section: Section) -> None:
    """The cases of one engine, which is gone afterwards."""
    made: list[LLM] = []

    def start() -> dict:
        # without a prefix cache the same prompts are computed again, in the same steps
        llm, facts = new_llm(section, enable_prefix_caching=False)
        llm.tokenizer = SimpleNamespace(backend_tokenizer=words(llm.runner.vocab_size))
        made.append(llm)
        return facts

    section.case("start", start)
    if not made:
        return
    (llm,) = made
    kinds = {}
    for name, params in KINDS.items():
        kinds[name] = section.case(name, partial(decodes, section, llm, params, name == "streamed"))
    columns = [(name, ",.3f") for name in ("ms", "launch_ms", "deliver_ms")]
    columns += [("tokens_per_second", ",.0f")]
    show("decodes|ms|launch|deliver|tokens/s", columns, kinds)
    print("a failed step:", section.case("a failed step", partial(after_failure, section, llm)))


def words(vocab_size: int) -> Tokenizer:
    """A tokenizer for the random weights, which have none: each token is a number."""
    return Tokenizer(WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))


def decodes(section: Section, llm: LLM, params: dict, is_streamed: bool) -> dict:
    """Median milliseconds of a step of all sequences, and of the host in it. Streams are read as the
    server reads them: while the device computes the next step."""
    sizes = section.sizes
    leave(llm, 0)  # none, unless the case before has failed
    num_tokens = 2 * sizes.steps + 100  # the first requests go on while others begin
    all_params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
    prompts = random_prompts(llm, sizes.batch, sizes.context * 3 // 2)
    states = begin_decodes(llm, prompts, all_params)
    readers = [Reader(state) for state in states if is_streamed]
    step = partial(llm.step, report=False)
    llm.meanwhile.append(lambda: [reader.news() for reader in readers])
    try:
        ms = wall_time(step, sizes.steps)["ms_p50"]
        with ExitStack() as patches:
            launch = Watched(patches, llm.runner, "launch")
            deliver = Watched(patches, llm, "_deliver")
            wall_time(step, sizes.steps)
    finally:
        llm.meanwhile.pop()
    num_left = len(llm.requests)
    leave(llm, 0)
    if num_left != sizes.batch:
        raise RuntimeError(f"{num_left} of {sizes.batch} sequences were measured")
    return {
        "ms": ms,
        "tokens_per_second": 1000 * sizes.batch / ms,
        "launch_ms": 1000 * (percentile(launch.seconds, 50) or 0),
        "deliver_ms": 1000 * (percentile(deliver.seconds, 50) or 0),
    }


def after_failure(section: Section, llm: LLM) -> dict:
    """A step fails once: its requests are answered all the same, and later ones as before."""
    leave(llm, 0)
    before = greedy(section, llm)
    with mock.patch.object(llm.runner, "sample", failing_once(llm.runner.sample)):
        meanwhile = greedy(section, llm)
    after = greedy(section, llm)
    facts = {
        "failed_steps": llm.stats()["failed_steps"],
        # requests that began anew were computed in other chunks, which round differently
        "same_meanwhile": sum(one == other for one, other in zip(before, meanwhile)),
        "same": sum(one == other for one, other in zip(before, after)),
    }
    if facts["failed_steps"] == 0:
        facts["error"] = "no step has failed"
    elif any(len(tokens) != 4 for tokens in meanwhile):
        facts["error"] = "the requests of the failed step were not answered"
    elif after != before:
        facts["error"] = f"{facts['same']} of {len(before)} answers are as before"
    return facts


def greedy(section: Section, llm: LLM) -> list[list[int]]:
    """Four tokens of each answer."""
    prompts = random_prompts(llm, section.sizes.prompts, 4 * section.sizes.tokens)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def failing_once(call: Callable) -> Callable:
    """The function, whose third call raises: after the prompts and a decode."""
    calls = count()

    def failing(*args):
        if next(calls) == 2:
            raise RuntimeError("this step was made to fail")
        return call(*args)

    return failing


def mapped(section: Section) -> dict:
    """Seconds of a start with mapped memory, milliseconds of a step, and the calls that map pages.

    With as many rows as an engine has by default.
    """
    sizes = section.sizes
    with page_calls(section) as calls:
        llm, facts = new_llm(section, attention_backend="vattention", num_blocks=2000)
        facts["calls_of_start"] = summary(calls)
        params = SamplingParams(max_tokens=sizes.steps + 60, ignore_eos=True)
        begin_decodes(llm, random_prompts(llm, sizes.prompts, 4 * sizes.tokens), params)
        for call in calls.values():
            call.seconds.clear()
        facts["step"] = wall_time(partial(llm.step, report=False), sizes.steps)
    facts["calls_of_step"] = summary(calls, sizes.steps)
    return facts


@contextmanager
def page_calls(section: Section) -> Iterator[dict[str, Watched]]:
    """Notes each call that maps pages: of the GPU's driver, or, with --cpu, of the host's memory."""
    owner: Any = HostMemory
    names = ["reserve", "map", "unmap"]
    if not section.cpu:
        from cuda.bindings import driver

        owner = driver
        names = PAGE_CALLS
    with ExitStack() as patches:
        yield {name: Watched(patches, owner, name) for name in names}


def summary(calls: dict[str, Watched], steps: int = 1) -> dict[str, dict]:
    """Calls and milliseconds per step."""
    found = {}
    for name, call in calls.items():
        count = len(call.seconds)
        found[name] = {"calls": count / steps, "ms": 1000 * sum(call.seconds) / steps}
    return found


if __name__ == "__main__":
    run(options)
