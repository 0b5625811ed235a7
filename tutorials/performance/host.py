"""`bench.py host`: what Python does between two launches of the model, as CPU time of its thread per decode step.

The model is replaced by zeros, so all that remains is the host's work: the scheduler, the check of its plan, the step's
tensors, their way into the buffer of a CUDA graph (here in the CPU's memory), the tokens on their way to the users. With
`--beside DIR ...`, other checkouts of this repository are measured in turns with this one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tutorials.performance.machine import ROOT, device_name, environment, installed
from tutorials.performance.report import percentile, table

CASES = [
    (n, longest) for longest in (4096, 40960) for n in (1, 64, 256)
]  # sequences, max_model_len
CONTEXT, STEPS = 500, 60
SHAPE = dict(
    model_type="qwen3",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=1,
)
SHAPE |= dict(num_key_value_heads=1, head_dim=32, vocab_size=100, max_position_embeddings=40960)


def engine(path: str, num_seqs: int, max_model_len: int):
    """An engine that decodes `num_seqs` sequences through graphs, whose model and head are zeros."""
    import torch

    from nanovllm import LLM, SamplingParams

    llm = LLM(
        path, device="cpu", dtype="float32", attention_backend="triton", max_model_len=max_model_len, max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * (CONTEXT + 1), num_blocks=num_seqs * -(-(CONTEXT + 10 * STEPS) // 16),
    )  # fmt: skip
    runner, hidden = llm.runner, torch.zeros(num_seqs * (CONTEXT + 1), SHAPE["hidden_size"])
    runner.model.forward = lambda input_ids, positions, batch: hidden[: len(input_ids)]
    runner.model.lm_head.forward = lambda hidden: torch.zeros(len(hidden), 1)
    replays = (
        getattr(runner.graphs, "replays", None) or runner.graphs.steps
    )  # as older commits call them
    for size in replays:
        replays[size] = lambda size=size: hidden[:size]
    params = SamplingParams(temperature=0, max_tokens=10 * STEPS, ignore_eos=True)
    for i in range(num_seqs):
        llm.add_request([i % 90] * CONTEXT, params)
    for _ in range(20):
        llm.step()
    return llm


def seconds_per_step(llm) -> float:
    """The least of three."""
    times = []
    for _ in range(3):
        begin = time.thread_time()
        for _ in range(STEPS):
            llm.step()
        times.append((time.thread_time() - begin) / STEPS)
    return min(times)


def seconds_per_phase(llm) -> dict[str, float]:
    """Each phase with what it calls; measuring makes all of them a little slower."""
    from nanovllm import engine

    spent: Counter = Counter()
    phases = [(llm.scheduler, "schedule"), (engine, "check_schedule"), (llm.runner, "prepare")]
    phases += [(llm.runner.graphs, "run"), (llm.scheduler, "update"), (llm, "_deliver")]

    def timed(owner, name):
        function = getattr(owner, name)

        def wrapper(*args, **kwargs):
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.thread_time() - begin

        setattr(owner, name, wrapper)

    for owner, name in phases:
        if hasattr(owner, name):
            timed(owner, name)
    for _ in range(STEPS):
        llm.step()
    return {name: seconds / STEPS for name, seconds in spent.items()}


def worker() -> None:
    """Prints what the nanovllm that Python finds takes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        config = AutoConfig.for_model(**SHAPE, tie_word_embeddings=True)
        weights = AutoModelForCausalLM.from_config(config).state_dict()
        save_file(
            {k: v for k, v in weights.items() if k != "lm_head.weight"},
            Path(path) / "model.safetensors",
        )
        config.save_pretrained(path)
        report = {}
        for num_seqs, max_model_len in CASES:
            llm = engine(path, num_seqs, max_model_len)
            seconds = seconds_per_step(llm)
            report[f"{num_seqs}, {max_model_len}"] = {"step": seconds, **seconds_per_phase(llm)}
    print(json.dumps(report))


def measured(tree: Path) -> dict:
    environ = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tree),
    }
    command = [sys.executable, str(ROOT / "tutorials/performance/host.py")]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tree} cannot be measured: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(args) -> dict:
    """`bench.py host`: prints the medians, and returns the report."""
    import torch

    report = environment() | {
        "device": device_name(torch.device("cpu"), 1),
        "context": CONTEXT,
        "host": {},
    }
    report |= {"versions": {name: installed(name) for name in ("torch",)}}
    trees = {"this": ROOT} | {path.name: path.resolve() for path in args.beside}
    runs = [{name: measured(tree) for name, tree in trees.items()} for _ in range(args.repeat)]
    rows = {}
    for name in trees:
        for case in runs[0][name]:
            phases = runs[0][name][case]
            medians = {
                phase: percentile([run[name][case].get(phase, 0.0) for run in runs], 50)
                for phase in phases
            }
            report["host"].setdefault(name, {})[case] = medians
            rows[f"{name}: {case}"] = {phase: 1e3 * seconds for phase, seconds in medians.items()}
    phases = list(dict.fromkeys(phase for row in rows.values() for phase in row))
    rows = {name: {phase: row.get(phase, 0.0) for phase in phases} for name, row in rows.items()}
    print(
        f"{report['device']}: CPU time of a decode step's host part, in ms (sequences, max_model_len)\n"
    )
    print(table("|".join(["host", *phases]), [(phase, ".3f") for phase in phases], rows))
    return report


if __name__ == "__main__":
    worker()
