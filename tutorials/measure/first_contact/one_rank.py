"""A single rank, whose collectives go through NCCL (gloo on a CPU), beside an engine without ranks.

What hangs in a collective is ended by the clock.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from nanovllm import LLM, SamplingParams
from tutorials.machine import ROOT
from tutorials.measure.first_contact.section import Section, run, show
from tutorials.measure.first_contact.start import random_prompts
from tutorials.report import percentile

NUM_SEQS = 32
OPTIONS: dict[str, Any] = {"num_blocks": 400, "max_num_seqs": NUM_SEQS, "max_model_len": 256}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
Tokens = list[list[int]]


def one_rank(section: Section) -> None:
    """An engine without ranks, and one rank: starts, decode steps, and whether answers agree."""
    sys.path.insert(0, str(ROOT / "tests" / "tools"))
    from thread_group import one_rank

    device = "cpu" if section.cpu else "cuda:0"
    answers: list[Tokens] = []
    starts = {"no ranks": partial(LLM, device=device), "one rank": partial(one_rank, device)}
    cases = {}
    for name, start in starts.items():
        cases[name] = section.case(name, partial(measured, start, section.model, answers))
    show("ranks|start s|ms|same", [("start_seconds", ",.1f"), ("ms", ",.3f"), ("same", "")], cases)


def measured(new: Callable[..., LLM], model: str, answers: list[Tokens]) -> dict:
    """Seconds of the start, milliseconds of a decode step, and how many answers are the first
    engine's."""
    start = time.perf_counter()
    llm = new(model=model, enable_prefix_caching=False, **OPTIONS)
    facts: dict[str, Any] = {"start_seconds": time.perf_counter() - start}
    facts["recordings"] = len(llm.runner.graphs.sizes) if llm.runner.graphs else 0
    steps: list[float] = []
    llm.observers.append(lambda schedule, seconds: steps.append(seconds))
    outputs = llm.generate(random_prompts(llm, NUM_SEQS, 64), PARAMS, use_tqdm=False)
    facts["ms"] = 1000 * (percentile(steps, 50) or 0)
    answers.append([output.outputs[0].token_ids for output in outputs])
    facts["same"] = sum(one == other for one, other in zip(answers[0], answers[-1]))
    return facts


if __name__ == "__main__":
    run(one_rank)
