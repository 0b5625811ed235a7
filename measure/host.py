"""`bench.py host`: what Python does between two launches of the model, as CPU time of its thread.

The model is replaced by zeros, so all that remains is the host's work: the scheduler, the check of
its plan, the step's tensors, their way into the buffer of a CUDA graph (here in the CPU's memory),
the tokens on their way to the users. Then the same with more and more requests that wait: a step,
an abort and a step that fails. With `--beside DIR ...`, other checkouts of this repository are
measured in turns with this one.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tutorials.machine import ROOT, device_name, environment, installed
from tutorials.report import aligned, percentile, rows_of

CASES = [(n, longest) for longest in (4096, 40960) for n in (1, 64, 256)]
"""Sequences, max_model_len."""
QUEUES = (10, 1_000, 100_000)
"""Requests that wait while 64 run."""
CONTEXT = 500
WARM_UP = 20
STEPS = 60
SHAPE = dict(
    model_type="qwen3",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=100,
    max_position_embeddings=40960,
)


def engine(path: str, num_seqs: int, max_model_len: int):
    """An engine that decodes `num_seqs` sequences through graphs, whose model and head are
    zeros."""
    import torch

    from nanovllm import LLM, SamplingParams

    num_tokens = num_seqs * (CONTEXT + 1)
    num_outputs = WARM_UP + 10 * STEPS  # more than will be computed
    llm = LLM(
        path,
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        num_blocks=num_seqs * -(-(CONTEXT + num_outputs) // 16),
    )
    runner = llm.runner
    hidden = torch.zeros(num_tokens + 2048, SHAPE["hidden_size"])  # and padding
    runner.model.forward = lambda input_ids, positions, batch: hidden[: len(input_ids)]
    runner.model.lm_head.forward = lambda hidden: torch.zeros(len(hidden), 1)
    replays = getattr(runner.graphs, "replays", None) or runner.graphs.steps  # of older commits
    for size in replays:
        num_rows = sum(size) if isinstance(size, tuple) else size
        replays[size] = lambda num_rows=num_rows: hidden[:num_rows]
    params = SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)
    for i in range(num_seqs):
        llm.add_request([i % 90] * CONTEXT, params)
    for _ in range(WARM_UP):
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
    """What LLM.step does, phase by phase, the least of three; no caller reads the tokens. `prepare` is
    a part of `run`, and is done once more, to be timed."""

    def timed(name, function, *args):
        begin = time.thread_time()
        result = function(*args)
        spent[name] += time.thread_time() - begin
        return result

    rounds = []
    for _ in range(3):
        spent: Counter = Counter()
        for _ in range(STEPS):
            schedule = timed("schedule", llm.scheduler.schedule)
            timed("prepare", llm.runner.prepare, schedule)
            token_ids, logprobs = timed("run", llm.runner.run, schedule)
            timed("update", llm.scheduler.update, schedule, token_ids, logprobs)
        rounds.append(spent)
    return {name: min(spent[name] for spent in rounds) / STEPS for name in rounds[0]}


def seconds_by_queue(path: str, num_waiting: int) -> dict[str, float]:
    """Of a step, of an abort, and of a step that fails, while so many requests wait."""
    from nanovllm import SamplingParams

    llm = engine(path, 64, 4096)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    waiting = [llm.add_request([i % 90] * 4, params) for i in range(num_waiting)]
    llm.step()
    step = seconds_per_step(llm)
    some = waiting[:: max(1, num_waiting // 5)][:5]
    begin = time.thread_time()
    for request_id in some:
        llm.abort(request_id)
    llm.recovery.settle()  # where the next step would do it
    abort = (time.thread_time() - begin) / len(some)
    fail(llm)
    gc.collect()  # what was thrown away before
    begin = time.thread_time()
    llm.step()
    return {"step": step, "abort": abort, "failed step": time.thread_time() - begin}


def fail(llm) -> None:
    """From now on, each step fails."""

    def failing(*args):
        raise RuntimeError("a fault, to see how long it takes to start over")

    llm.runner.launch = failing


def worker(has_phases: bool = True) -> None:
    """Prints what the nanovllm that Python finds takes; phases and queues only of this version."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of the step that fails
    with tempfile.TemporaryDirectory() as path:
        config = AutoConfig.for_model(**SHAPE, tie_word_embeddings=True)
        weights = AutoModelForCausalLM.from_config(config).state_dict()
        weights.pop("lm_head.weight", None)
        save_file(weights, Path(path) / "model.safetensors")
        config.save_pretrained(path)
        report: dict[str, dict] = {"host": {}, "queue": {}}
        for num_seqs, max_model_len in CASES:
            llm = engine(path, num_seqs, max_model_len)
            seconds = {"step": seconds_per_step(llm)}
            if has_phases:
                seconds |= seconds_per_phase(llm)
            report["host"][f"{num_seqs}, {max_model_len}"] = seconds
        if has_phases:
            report["queue"] = {f"{n:,}": seconds_by_queue(path, n) for n in QUEUES}
    print(json.dumps(report))


def measured(tree: Path) -> dict:
    environ = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tree),
    }
    phases = ["phases"] if tree == ROOT else []
    command = [sys.executable, str(ROOT / "measure/host.py"), *phases]
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tree} cannot be measured: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(reports: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each number: the median of the runs."""
    return {
        case: {name: percentile([report[case][name] for report in reports], 50) for name in row}
        for case, row in reports[0].items()
    }


def measure(args) -> dict:
    """`bench.py host`: prints the medians, and returns the report."""
    import torch

    report = environment() | {"device": device_name(torch.device("cpu"), 1), "context": CONTEXT}
    report["versions"] = {name: installed(name) for name in ("torch",)}
    trees = {"this": ROOT} | {path.name: path.resolve() for path in args.beside}
    runs = [{name: measured(tree) for name, tree in trees.items()} for _ in range(args.repeat)]
    report["host"] = {name: medians([run[name]["host"] for run in runs]) for name in trees}
    report["queue"] = medians([run["this"]["queue"] for run in runs])
    print(f"{report['device']}: CPU time of the host's part of a decode step, in ms\n")
    print(aligned(rows(report)), aligned(queue_rows(report)), sep="\n\n")
    return report


def rows(report: dict) -> list[list[str]]:
    """Milliseconds of a step by commit, and of its phases in the last one."""
    names = [name for name in report["host"] if name != "this"]
    phases = [name for name in next(iter(report["host"]["this"].values())) if name != "step"]
    commits = [*names, str(report["commit"])]
    found = [["sequences, max_model_len", *commits, *(f"`{phase}`" for phase in phases)]]
    for case, now in report["host"]["this"].items():
        times = [report["host"][name][case]["step"] for name in names]
        times += [now["step"], *(now[phase] for phase in phases)]
        found.append([case, *(f"{1e3 * seconds:.2f}" for seconds in times)])
    return found


def queue_rows(report: dict) -> list[list[str]]:
    """Milliseconds of a step, of an abort and of a failed step while requests wait."""
    names = list(next(iter(report["queue"].values())))
    columns = [(name, ",.2f", 1e3) for name in names]
    return rows_of("|".join(["requests that wait", *names]), columns, report["queue"])


if __name__ == "__main__":
    worker(has_phases="phases" in sys.argv[1:])
