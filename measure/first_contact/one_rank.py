"""A single rank, whose collectives go through NCCL (gloo on a CPU), beside an engine without ranks.

Run: python -m measure.first_contact.one_rank MODEL DEVICE FILE
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure.first_contact.start import random_prompts
from nanovllm import LLM, SamplingParams
from tutorials.machine import ROOT
from tutorials.report import percentile, write_json

NUM_SEQS = 32
OPTIONS = {"num_blocks": 400, "max_num_seqs": NUM_SEQS, "max_model_len": 256}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def measured(new: Callable[..., LLM], model: str) -> tuple[dict, list[list[int]]]:
    """Seconds of the start, milliseconds of a decode step, and the tokens."""
    start = time.perf_counter()
    llm = new(model=model, enable_prefix_caching=False, **OPTIONS)
    facts = {"start_seconds": time.perf_counter() - start}
    facts["recordings"] = len(llm.runner.graphs.sizes) if llm.runner.graphs else 0
    steps: list[float] = []
    llm.observers.append(lambda schedule, seconds: steps.append(seconds))
    outputs = llm.generate(random_prompts(llm, NUM_SEQS, 64), PARAMS, use_tqdm=False)
    facts["ms"] = 1000 * (percentile(steps, 50) or 0)
    return facts, [output.outputs[0].token_ids for output in outputs]


def main(model: str, device: str, file: str) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "tools"))
    from thread_group import one_rank

    report, expected = measured(partial(LLM, device=device), model)
    ranks, tokens = measured(partial(one_rank, device), model)
    ranks["same"] = sum(one == other for one, other in zip(tokens, expected))
    write_json({"no ranks": report, "one rank": ranks}, Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
