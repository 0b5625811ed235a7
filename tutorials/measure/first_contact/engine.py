"""Serving as a user does it: the start, the memory, and what is compiled meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch

from nanovllm import LLM, SamplingParams
from tutorials.measure.first_contact.section import Section, run, show
from tutorials.measure.first_contact.start import new_llm, random_prompts

ALLOWED_OVER = 2**29  # bytes: modules that are loaded later, and what lies between allocations


def engine(section: Section) -> None:
    """Batches of all kinds: they stay within the memory that was granted, and compile nothing."""
    facts = section.case("serving", partial(serve, section))
    names = ("start", "load_model", "warm_up", "record")
    columns = [(f"{name}_seconds", ",.2f") for name in names]
    show("engine|start s|load|warm up|record", columns, {"serving": facts})
    sizes = {name: value for name, value in facts.items() if name.endswith("_bytes")}
    sizes |= facts.get("terms", {})
    gib = {name: {"gib": value / 2**30} for name, value in sizes.items()}
    show("memory|GiB", [("gib", ",.3f")], gib)
    graphs = {row["size"]: row for row in facts.get("recordings", [])}
    show("graph of|s|MiB", [("seconds", ",.2f"), ("mib", ",.1f")], graphs)


def serve(section: Section) -> dict:
    others = memory_used(section)
    llm, facts = new_llm(section, max_model_len=None)  # the model's
    start = memory_used(section)
    with compilations() as compiled:
        llm.generate(*sorting(section, llm), use_tqdm=False)
        llm.generate(*mixture(section, llm), use_tqdm=False)
    used = memory_used(section)
    total = 0 if section.cpu else torch.cuda.mem_get_info()[1]
    granted = int(total * llm.config.gpu_memory_utilization)
    facts |= {
        "others_bytes": others,  # of other programs, and CUDA's context
        "used_at_start_bytes": start,
        "used_bytes": used,
        "granted_bytes": granted,
        "graphs_bytes": int(2**20 * sum(row["mib"] for row in facts["recordings"])),
        "compiled": compiled,
    }
    return facts | complaints(used - granted, compiled)


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
    length = section.sizes.tokens
    kinds = [{"temperature": 0}, {}, {"top_k": 20}, {"n": 2}]
    prompts = random_prompts(llm, section.sizes.prompts + 2, 8 * length)
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


def memory_used(section: Section) -> int:
    """Bytes that are taken on the GPU, by any program; 0 with --cpu."""
    if section.cpu:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    run(engine)
