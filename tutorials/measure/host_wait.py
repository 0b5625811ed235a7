"""Where the time of a decode goes: steps with overlap and without, in turns, and what the GPU
computes in one. Weights are random, prompts have 550 tokens, the temperature is 0.6.

    python -m tutorials.measure.host_wait host_wait.json     # without a GPU: add --small
"""

import sys
from pathlib import Path
from statistics import median

import torch

from nanovllm import LLM
from nanovllm.device.first_light import kernels_of, median_step, run_only
from tutorials.machine import device_name, environment, installed
from tutorials.measure.checkpoints import random_model
from tutorials.report import write_json

ROUNDS = 3


def times_of(llm: LLM, batch: int, count: int) -> dict:
    """Milliseconds of a step: the median of `count` in each round, and the median of these."""
    rounds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for overlap, found in rounds.items():
            seconds, num_tokens = median_step(llm, count, overlap)
            found.append(1e3 * seconds)
    facts = {"batch": batch, "context": round(num_tokens / batch)}
    facts |= {"wall_ms": median(rounds[True]), "rounds_ms": rounds[True]}
    alone = {"wall_ms_without_overlap": median(rounds[False])}
    return facts | alone | {"rounds_ms_without_overlap": rounds[False]}


def add_kernels(row: dict, llm: LLM, count: int) -> None:
    """Those that take longest: name, how often in a step, microseconds in all."""
    kernels = [
        (kernel.key, kernel.count / count, kernel.self_device_time_total / count)
        for kernel in kernels_of(llm, count)
    ]
    row["busy_ms"] = sum(us for *_, us in kernels) / 1e3
    row["waits"] = 1 - row["busy_ms"] / row["wall_ms"]
    row["waits_without_overlap"] = 1 - row["busy_ms"] / row["wall_ms_without_overlap"]
    row["kernels"] = sorted(kernels, key=lambda kernel: -kernel[2])[:16]
    print({key: row[key] for key in row if key != "kernels"})
    for name, number, us in row["kernels"]:
        print(f"{us:10.1f} us {number:6.1f} x {name[:80]}", flush=True)


def main(file: str, *small: str) -> None:
    about = environment()
    length, count, batches = (8, 2, (1, 2)) if small else (550, 16, (1, 16, 64, 256))
    path = None if small else str(random_model("qwen3-0.6b", Path("~/.cache/nanovllm")))
    llm = LLM(path, num_blocks=100 if small else None, max_model_len=512 if small else 4096)
    about |= {name: installed(name) for name in ("torch", "triton", "transformers")}
    about |= {"cuda": torch.version.cuda, "device": device_name(llm.runner.device)}
    about |= {"model": Path(llm.config.model).name, "dtype": str(llm.runner.dtype), "steps": []}
    for batch in batches:
        run_only(llm, batch, length)
        about["steps"].append(times_of(llm, batch, count))
        write_json(about, Path(file))  # each time: a limit of time loses only the rest
    for row in reversed(about["steps"]):  # later, as steps may be slower once there was a profiler
        run_only(llm, row["batch"], length)
        add_kernels(row, llm, count)
        write_json(about, Path(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
