"""How the parts start an engine, and what they note meanwhile."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest import mock

import torch

from nanovllm import LLM, SamplingParams, model_runner
from nanovllm.device import memory
from nanovllm.device.cuda_graphs import StepGraphs
from nanovllm.model_runner import ModelRunner
from nanovllm.processing.states import RequestState
from tutorials.measure.first_contact.section import Section
from tutorials.report import percentile


class Watched:
    """Calls of a function while it is patched: the seconds that each took, and its result."""

    def __init__(self, patches: ExitStack, owner: Any, name: str):
        self.seconds: list[float] = []
        self.results: list[Any] = []
        call = getattr(owner, name)

        @wraps(call)
        def noted(*args, **kwargs):
            start = time.perf_counter()
            try:
                result = call(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - start)
            self.results.append(result)
            return result

        patches.enter_context(mock.patch.object(owner, name, noted))


def noting_recordings(section: Section, recordings: list[dict]) -> Callable:
    """`StepGraphs.record`, which also notes the seconds and the memory of each graph."""
    record = StepGraphs.record

    def noted(graphs: StepGraphs, size: int) -> None:
        free = free_bytes(section)
        start = time.perf_counter()
        record(graphs, size)
        seconds = time.perf_counter() - start
        mib = (free - free_bytes(section)) / 2**20
        recordings.append({"size": str(size), "seconds": seconds, "mib": mib})

    return noted


def free_bytes(section: Section) -> int:
    """That no program holds on the GPU, not even PyTorch for later; 0 with --cpu."""
    return 0 if section.cpu else memory.free_memory(section.device)


def new_llm(section: Section, **options) -> tuple[LLM, dict]:
    """An engine, and what its start took: seconds, and the terms of the cache's memory in bytes."""
    path = section.model
    options = {"dtype": section.dtype_name, "attention_backend": "triton"} | options
    recordings: list[dict] = []
    start = time.perf_counter()
    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(StepGraphs, "record", noting_recordings(section, recordings))
        )
        load = Watched(patches, model_runner, "load_model")
        warm_up = Watched(patches, ModelRunner, "warm_up")
        terms = {  # the last of a trial counts
            "peak": Watched(patches, torch.cuda, "max_memory_reserved"),
            "graphs": Watched(patches, memory, "graph_memory"),
            "left": Watched(patches, model_runner, "memory_left"),
        }
        llm = LLM(path, **(section.sizes.options | options))
    facts = {
        "start_seconds": time.perf_counter() - start,
        "load_model_seconds": sum(load.seconds),
        "warm_up_seconds": sum(warm_up.seconds),
        "record_seconds": sum(row["seconds"] for row in recordings),
        "terms": {name: term.results[-1] for name, term in terms.items() if term.results},
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


def begin_decodes(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestState]:
    """Adds requests, and computes their prompts: from now on each step decodes all of them."""
    states = [
        llm._submit(llm.inputs.request(prompt, params), is_reported=False) for prompt in prompts
    ]
    sequences = [request.sequences[0] for request in llm.requests.values()]
    while any(seq.num_missing_tokens > 1 for seq in sequences):
        llm.step(report=False)
    return states


def leave(llm: LLM, count: int) -> dict:
    """Aborts all requests but so many."""
    for name in list(llm.requests)[count:]:
        llm.abort(name)
    llm.step(report=False)
    return {"requests": len(llm.requests)}


def wall_time(step: Callable, count: int) -> dict:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return percentiles(seconds)


def percentiles(seconds: list[float]) -> dict:
    return {f"ms_p{q}": 1000 * (percentile(seconds, q) or 0) for q in (10, 50, 90)}
