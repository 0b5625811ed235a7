"""Section 3: the engine's answers, and the memory that it takes."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from measure.first_contact.kernels import difference, worst
from measure.first_contact.section import Section
from measure.first_contact.start import new_llm, random_prompts
from nanovllm import LLM, SamplingParams

ALLOWED_OVER = 2**29  # bytes: modules that are loaded later, and what lies between allocations
Logits = list[torch.Tensor]  # of each step, [rows, vocab] in fp32
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"attention_backend": "torch"},
    "eager": {"attention_backend": "triton", "enforce_eager": True},
    "graphs": {"attention_backend": "triton"},
}


def engine(section: Section) -> None:
    """All backends: logits in the engine's dtype, its memory, tokens in fp32, and two engines."""
    tokens: dict[str, list] = {}
    logits: dict[str, Logits] = {}
    ask_logits = partial(ask_for_logits, section, all_logits=logits)
    ask_tokens = partial(ask_for_tokens, section, answers=tokens)
    # first what users get: the clock may end what is last, and in this process nothing is compiled
    section.case("serving", partial(serve, section))
    section.case("logits: torch", partial(ask_logits, "torch"))
    section.case("logits: graphs", partial(ask_logits, "graphs"))
    section.case("two engines", partial(check_two_engines, section))
    section.case("logits: eager", partial(ask_logits, "eager"))
    for name in ("torch", "graphs", "eager"):
        section.case(f"tokens: {name}", partial(ask_tokens, name))
    show(section)


def show(section: Section) -> None:
    names = ("start", "load_model", "warm_up", "record", "generate")
    columns = [(f"{name}_seconds", ",.2f") for name in names]
    columns += [("same", ""), ("difference", ".1e")]
    section.show("engine|start s|load|warm up|record|generate|same tokens|logits", columns)
    facts = section.cases.get("serving", {})
    sizes = {name: value for name, value in facts.items() if name.endswith("_bytes")}
    sizes |= facts.get("terms", {})
    sizes.pop("num_blocks", None)
    gib = {name: {"gib": value / 2**30} for name, value in sizes.items()}
    section.show("memory|GiB", [("gib", ",.3f")], gib)
    graphs = {str(row["size"]): row for row in facts.get("recordings", [])}
    section.show("graph of|s|MiB", [("seconds", ",.2f"), ("mib", ",.1f")], graphs)


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
    answers[name] = token_ids(outputs)
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


def serve(section: Section) -> dict:
    """Batches of all kinds: they stay within the memory that was granted, and compile nothing."""
    llm, facts = new_llm(section, dtype=section.dtype_name, attention_backend="triton")
    facts["used_at_start_bytes"] = memory_used(section)
    with compilations() as compiled:
        llm.generate(*sorting(section, llm), use_tqdm=False)
        llm.generate(*mixture(section, llm), use_tqdm=False)
    facts["compiled"] = compiled
    facts["used_bytes"] = memory_used(section)
    facts["granted_bytes"] = facts["terms"].get("granted", 0)
    facts["graphs_bytes"] = int(2**20 * sum(row["mib"] for row in facts["recordings"]))
    return facts | complaints(facts["used_bytes"] - facts["granted_bytes"], compiled)


def complaints(over: int, compiled: list[str] | None) -> dict:
    """An error if serving took more memory than was granted, or compiled kernels."""
    problems = []
    if over > ALLOWED_OVER:
        problems.append(f"{over / 2**30:.2f} GiB more than granted")
    if compiled:
        problems.append(f"{len(compiled)} kernels were compiled while serving: {compiled[0]}")
    return {"error": "; ".join(problems)} if problems else {}


def sorting(section: Section, llm: LLM) -> tuple[list, SamplingParams]:
    """A batch that sorts all its logits, which is what takes the most memory."""
    params = SamplingParams(top_p=0.9, max_tokens=2, ignore_eos=True)
    return random_prompts(llm, section.sizes.batch, 32), params


def mixture(section: Section, llm: LLM) -> tuple[list, list]:
    """Chunks beside decodes, some of them greedy, drawn, filtered, or with copied blocks."""
    count, length = section.sizes.greedy
    kinds = [{"temperature": 0}, {}, {"top_k": 20}, {"n": 2}]
    prompts = random_prompts(llm, count + 2, 8 * length)
    params = []
    for i in range(len(prompts)):
        kind = kinds[i % len(kinds)]
        params.append(SamplingParams(max_tokens=2 + i % length, ignore_eos=True, **kind))
    return prompts, params


@contextmanager
def compilations() -> Iterator[list[str] | None]:
    """The kernels that Triton compiles meanwhile, or finds compiled on the disk; None: unknown."""
    import triton

    compiled: list[str] = []

    def hook(*, repr: str, **_) -> None:
        compiled.append(repr)

    if not hasattr(triton.knobs.runtime, "jit_post_compile_hook"):
        yield None
        return
    with mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", hook):
        yield compiled


def check_two_engines(section: Section) -> dict:
    """The second one still gives the same tokens when the first is gone, with all that it held."""
    options = {
        "dtype": section.dtype_name,
        "attention_backend": "triton",
        "enable_prefix_caching": False,  # or its second answer would compute other chunks
        "max_num_seqs": section.sizes.greedy[0],
        "num_blocks": 1000,
    }
    first, facts = new_llm(section, **options)
    answers = [token_ids(generate(section, first, facts, 4))]
    second, _ = new_llm(section, **options)
    answers.append(token_ids(generate(section, second, facts, 4)))
    gone = weakref.ref(first.runner)
    del first
    gc.collect()
    rubbish = None
    if not section.cpu:
        torch.cuda.empty_cache()
        rubbish = torch.full((2**30,), torch.nan, device=section.device)  # where it was
    answers.append(token_ids(generate(section, second, facts, 4)))
    del rubbish
    same = [answer == answers[0] for answer in answers]
    facts["same"] = f"{sum(same)} of {len(same)}"
    if gone() is not None:
        facts["error"] = "the first engine is still there"
    elif not all(same):
        facts["error"] = f"other tokens: {same}"
    return facts


def token_ids(outputs: list) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def memory_used(section: Section) -> int:
    """Bytes that are taken on the GPU, by whomever; 0 with --cpu."""
    if section.cpu:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
