"""Section 3: the engine's answers, and the memory that it takes."""

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

from nanovllm import LLM, SamplingParams, memory, model_runner
from nanovllm.config import Config
from nanovllm.cuda_graphs import DecodeGraphs
from nanovllm.model_runner import ModelRunner
from tutorials.performance.first_contact.kernels import difference, worst
from tutorials.performance.first_contact.section import Section

Logits = list[torch.Tensor]  # of each step, [rows, vocab] in fp32
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"attention_backend": "torch"},
    "eager": {"attention_backend": "triton", "enforce_eager": True},
    "graphs": {"attention_backend": "triton"},
}


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


def noting_terms(call: Callable, terms: dict[str, int]) -> Callable:
    """A call that sizes the cache, which also notes each term of the sum."""
    codes = [function.__code__ for function in (Config.num_blocks_in, memory.memory_left)]

    def at_return(frame, event, arg):
        if event == "return" and frame.f_code in codes:
            values = frame.f_locals.items()
            terms.update((name, value) for name, value in values if type(value) is int)

    def noted(*args):
        sys.setprofile(at_return)
        try:
            return call(*args)
        finally:
            sys.setprofile(None)

    return noted


def new_llm(section: Section, **options) -> tuple[LLM, dict]:
    """An engine, and what its start took: seconds, and the terms of the cache's memory in bytes."""
    log: dict[str, list[float]] = {"load_model": [], "warm_up": [], "record": []}
    owners = (model_runner, ModelRunner, DecodeGraphs)
    terms: dict[str, int] = {}
    path = section.model()
    fit = noting_terms(ModelRunner._num_blocks_that_fit, terms)
    start = time.perf_counter()
    with ExitStack() as patches:
        for owner, (name, seconds) in zip(owners, log.items()):
            patches.enter_context(watch(owner, name, seconds))
        patches.enter_context(mock.patch.object(ModelRunner, "_num_blocks_that_fit", fit))
        llm = LLM(path, **(section.sizes.options | options))
    facts = {"start_seconds": time.perf_counter() - start, "recorded": len(log["record"])}
    facts |= {f"{name}_seconds": sum(seconds) for name, seconds in log.items()}
    return llm, facts | {"terms": terms, "kv_bytes": llm.runner.kv_cache.tensor.nbytes}


def random_prompts(llm: LLM, count: int, longest: int) -> list[list[int]]:
    """The longest prompt is three times as long as the shortest."""
    rng = random.Random(0)
    vocab = llm.runner.vocab_size
    lengths = (rng.randint(longest // 3 + 1, longest) for _ in range(count))
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def engine(section: Section) -> None:
    """All backends: greedy tokens in fp32, logits in the engine's dtype; the memory and its use."""
    tokens: dict[str, list] = {}
    logits: dict[str, Logits] = {}
    for name in BACKENDS:
        section.case(f"tokens: {name}", partial(ask_for_tokens, section, name, tokens))
    for name in BACKENDS:
        section.case(f"logits: {name}", partial(ask_for_logits, section, name, logits))
    section.case("top-p", partial(check_memory, section))
    names = ("start", "load_model", "warm_up", "record", "generate")
    columns = [(f"{name}_seconds", ",.2f") for name in names]
    columns += [("same", ""), ("difference", ".1e")]
    section.show("engine|start s|load|warm up|record|generate|same tokens|logits", columns)
    facts = section.cases.get("top-p", {})
    sizes = {name: value for name, value in facts.items() if name.endswith("_bytes")}
    sizes |= facts.get("terms", {})
    sizes.pop("num_blocks", None)
    gib = {name: {"gib": value / 2**30} for name, value in sizes.items()}
    section.show("memory|GiB", [("gib", ",.3f")], gib)


def generate(section: Section, llm: LLM, facts: dict, max_tokens: int) -> list:
    """The outputs of all prompts; the facts get the seconds."""
    count, length = section.sizes.greedy
    prompts = random_prompts(llm, count, 4 * length)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    facts["generate_seconds"] = time.perf_counter() - start
    return [output.outputs[0] for output in outputs]


def ask_for_tokens(section: Section, name: str, answers: dict[str, list]) -> dict:
    """In fp32 the tokens are PyTorch's, unless two of them are equally likely."""
    llm, facts = new_llm(section, dtype="float32", **BACKENDS[name])
    outputs = generate(section, llm, facts, section.sizes.greedy[1])
    answers[name] = [output.token_ids for output in outputs]
    if name == "torch" or "torch" not in answers:
        return facts
    pairs = list(zip(outputs, answers["torch"]))
    wrong = [i for i, (output, expected) in enumerate(pairs) if output.token_ids != expected]
    facts["same"] = f"{len(pairs) - len(wrong)} of {len(pairs)}"
    facts["unequal"] = [unequal_at(*pairs[i]) | {"prompt": i} for i in wrong]
    if any(case["gap"] >= 1e-4 for case in facts["unequal"]):
        facts["error"] = f"{len(wrong)} prompts have other tokens"
    return facts


def unequal_at(output, expected: list[int]) -> dict:
    """Where the tokens part, and the gap between the two likeliest: rounding decides a tie."""
    pairs = zip(output.token_ids, expected)
    at = next(i for i, (one, other) in enumerate(pairs) if one != other)
    likeliest = sorted(output.logprobs[at].values())[-2:]
    return {"position": at, "gap": likeliest[-1] - likeliest[0]}


def ask_for_logits(section: Section, name: str, all_logits: dict[str, Logits]) -> dict:
    """Of two steps, in the engine's dtype: near PyTorch's, as long as the tokens agree."""
    llm, facts = new_llm(section, dtype=section.dtype_name, **BACKENDS[name])
    seen = all_logits[name] = []
    llm.runner.model.lm_head.register_forward_hook(
        lambda module, args, out: seen.append(out[:64].float().cpu())
    )
    generate(section, llm, facts, max_tokens=2)
    if name == "torch" or "torch" not in all_logits:
        return facts
    (first, second), (expected_first, expected_second) = seen, all_logits["torch"]
    alike = first.argmax(dim=1) == expected_first.argmax(dim=1)
    facts["same"] = f"{int(alike.sum())} of {len(alike)}"
    return facts | worst(
        difference(first, expected_first, 0.1),
        difference(second[alike], expected_second[alike], 0.1),
    )


def memory_used(section: Section) -> int:
    """Bytes that are taken on the GPU, by whomever; 0 with --cpu."""
    if section.cpu:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_memory(section: Section) -> dict:
    """A batch that sorts all its logits, which is what takes the most memory."""
    llm, facts = new_llm(section, dtype=section.dtype_name, attention_backend="triton")
    facts["used_at_start_bytes"] = memory_used(section)
    params = SamplingParams(top_p=0.9, max_tokens=2, ignore_eos=True)
    llm.generate(random_prompts(llm, section.sizes.batch, 32), params, use_tqdm=False)
    facts["used_bytes"] = memory_used(section)
    facts["granted_bytes"] = int(facts["terms"].get("total", 0) * llm.config.gpu_memory_utilization)
    over = facts["used_bytes"] - facts["granted_bytes"]
    return facts if over <= 0 else facts | {"error": f"{over / 2**30:.2f} GiB more than granted"}
