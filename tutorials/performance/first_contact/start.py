"""How the sections start an engine, and what they note meanwhile."""

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from nanovllm import LLM, SamplingParams, model_runner
from nanovllm.config import Config
from nanovllm.device import memory
from nanovllm.device.cuda_graphs import StepGraphs
from nanovllm.frontend.replies import Reply
from nanovllm.model_runner import ModelRunner
from tutorials.performance.first_contact.section import Section


def timed(call: Callable, seconds: list[float]) -> Callable:
    """The function, which also notes how long each call takes."""

    def noted(*args, **kwargs):
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return noted


def watch(owner: Any, name: str, seconds: list[float]):
    """A patch that notes how long each call takes."""
    return mock.patch.object(owner, name, timed(getattr(owner, name), seconds))


def unwatched(call: Callable) -> Callable:
    """The function at its full speed: Triton compiles in Python, and `noting_terms` would slow it."""

    def at_full_speed(*args):
        watcher = sys.getprofile()
        sys.setprofile(None)
        try:
            return call(*args)
        finally:
            sys.setprofile(watcher)

    return at_full_speed


def noting_terms(call: Callable, terms: dict[str, int]) -> Callable:
    """A call that sizes the cache, which also notes each term of the sum."""
    codes = [function.__code__ for function in (Config.num_blocks_in, memory.memory_left)]
    run = unwatched(ModelRunner.run)
    graph_memory = unwatched(memory.graph_memory)

    def at_return(frame, event, arg):
        if event == "return" and frame.f_code in codes:
            values = frame.f_locals.items()
            terms.update((name, value) for name, value in values if type(value) is int)

    def noted(*args):
        with (
            mock.patch.object(ModelRunner, "run", run),
            mock.patch.object(memory, "graph_memory", graph_memory),
        ):
            sys.setprofile(at_return)
            try:
                return call(*args)
            finally:
                sys.setprofile(None)

    return noted


def noting_recordings(section: Section, recordings: list[dict]) -> Callable:
    """`StepGraphs.record`, which also notes the seconds and the memory of each graph."""
    record = StepGraphs.record

    def noted(graphs: StepGraphs, size: int) -> None:
        free = free_bytes(section)
        start = time.perf_counter()
        record(graphs, size)
        seconds = time.perf_counter() - start
        mib = (free - free_bytes(section)) / 2**20
        recordings.append({"size": size, "seconds": seconds, "mib": mib})

    return noted


def free_bytes(section: Section) -> int:
    """That nobody holds on the GPU, not even PyTorch for later; 0 with --cpu."""
    return 0 if section.cpu else memory.free_memory(section.device)


def new_llm(section: Section, **options) -> tuple[LLM, dict]:
    """An engine, and what its start took: seconds, and the terms of the cache's memory in bytes."""
    load: list[float] = []
    warm_up: list[float] = []
    recordings: list[dict] = []
    terms: dict[str, int] = {}
    patches = (
        watch(model_runner, "load_model", load),
        watch(ModelRunner, "warm_up", warm_up),
        mock.patch.object(StepGraphs, "record", noting_recordings(section, recordings)),
        mock.patch.object(
            ModelRunner,
            "_num_blocks_that_fit",
            noting_terms(ModelRunner._num_blocks_that_fit, terms),
        ),
    )
    path = section.model()
    start = time.perf_counter()
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        llm = LLM(path, **(section.sizes.options | options))
    facts = {
        "start_seconds": time.perf_counter() - start,
        "load_model_seconds": sum(load),
        "warm_up_seconds": sum(warm_up),
        "record_seconds": sum(row["seconds"] for row in recordings),
        "terms": terms,
        "kv_bytes": llm.runner.kv_cache.tensor.nbytes,
    }
    if llm.runner.graphs is not None:
        facts["recordings"] = recordings[-len(llm.runner.graphs.sizes) :]  # without the trial's
    return llm, facts


def random_prompts(llm: LLM, count: int, longest: int) -> list[list[int]]:
    """The longest prompt is three times as long as the shortest."""
    rng = random.Random(0)
    vocab = llm.runner.vocab_size
    lengths = (rng.randint(longest // 3 + 1, longest) for _ in range(count))
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def begin_decodes(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, is_reported: bool = True
) -> list[Reply]:
    """Adds requests, and computes their prompts: from now on each step decodes all of them."""
    requests = [llm.inputs.request(prompt, params) for prompt in prompts]
    replies = [llm._submit(request, is_reported) for request in requests]
    sequences = [request.sequences[0] for request in llm.requests.values()]
    while any(seq.num_missing_tokens > 1 for seq in sequences):
        llm.step(report=False)
    return replies
