"""Calibrate: short runs of the real engine on this machine, and the cost model that fits them.

    python -m tutorials.measure.calibrate machine.json

On a CPU: the embedded model on one and two threads, in float32 and bfloat16, each in a process of
its own; under two minutes. On a GPU: the model that --model names, in its own type; a minute. The
file has a machine for each, which the simulator takes:

    from nanovllm.topics.simulator.machines import machines_in

    simulate(jobs, Config(model=EMBEDDED_MODEL, dtype="float32"), machines_in("machine.json")["float32, 1 thread"])

What is fitted: seconds per step, per sequence and per chunk, the rate of products, and two rates of
attention, for its bytes and its FLOPs. What is measured by itself: how fast weights are read, by
products of one row, and how fast blocks are swapped. `overlap` is the one that fits best of 0, 0.25,
0.5, 0.75 and 1. The constants belong to one model: what its layers take to be launched is in the
seconds per step.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm import LLM
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.layers.linear import Linear
from nanovllm.topics.simulator.cost_model import Shape, shape_of, work_of
from nanovllm.topics.simulator.machines import Machine
from nanovllm.topics.simulator.replica import model_config
from tutorials.arguments import checked, new_file, positive
from tutorials.machine import (
    ROOT,
    device_name,
    environment,
    installed,
    seconds_of,
    this_machine,
)
from tutorials.measure.recording import record
from tutorials.measure.steps import Step
from tutorials.report import write_json
from tutorials.simulation.workloads import all_at_once, fixed, workload

Options = dict[str, Any]  # fields of Config
# of the engine and of the simulator, unless a case has others
OPTIONS: Options = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_batched_tokens": 1024,
    "num_blocks": 4000,
}
SWAP: Options = {"preemption_mode": "swap", "swap_gib": 0.05}
MOST_SWAPPED = 64  # blocks that are copied to measure how fast it goes
OPTIONS_OF_GPU: Options = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_batched_tokens": 8192,
    "num_blocks": 8000,  # for all cells, so that none is preempted
}


# --- the fit ---

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROUNDS = 20
TINY = 1e-30  # seconds for what costs nothing
MOST_DISTURBED = 2.0  # times as long as guessed; what took longer counts as this


def fit(rows: list[list[float]], seconds: list[float], whole: list[float]) -> np.ndarray:
    """Seconds per unit of each column, none of them below 0. It makes the mean of |error| as small
    as it can, relative to the `whole` step, of which `seconds` are to be explained.

    Weighted least squares, again and again: what is far off counts less in the next round. Then a
    step in which the computer did something else has little weight.
    """
    table = np.array(rows, dtype=float) / np.array(whole)[:, None]
    target = np.array(seconds) / np.array(whole)
    scale = table.max(axis=0).clip(min=1e-300)
    table = table / scale
    used = table.any(axis=0)  # what is hidden in all steps has no cost that can be found
    weight = np.ones(len(target))
    while True:
        for _ in range(50):
            costs = np.zeros(len(used))
            weighted = table[:, used] * weight[:, None]
            costs[used] = np.linalg.lstsq(weighted, target * weight, rcond=None)[0]
            weight = np.abs(table @ costs - target).clip(min=1e-3) ** -0.5
        if (costs >= 0).all():
            return costs / scale
        used &= costs >= 0


def fitted(shape: Shape, steps: Sequence[Step], start: Machine, overlap: float) -> Machine:
    """The machine with this overlap on which these steps take as long as they did. What is not
    fitted is that of `start`: the hardware, and how fast weights are read.

    Which part is hidden, reading or computing, depends on the rates; so they are fitted, and the
    hidden parts are chosen again, until nothing changes any more. Such a fit finds the usual step.
    What disturbs one now and then is a part of what a server does: at last all times are scaled, so
    that real steps take as long as the guesses in the mean of their ratios.
    """
    machine = Machine(
        start.hardware,
        start.bandwidth_share,
        host_bytes_per_second=start.host_bytes_per_second,
        overlap=overlap,
        seconds_per_layer=0.0,
        sources=start.sources,
    )
    whole = [step.seconds for step in steps]
    for _ in range(ROUNDS):
        parts = [amounts(shape, step, machine) for step in steps]
        seconds = [all_of_it - known for all_of_it, (known, _) in zip(whole, parts)]
        before = machine
        machine = with_costs(machine, *map(float, fit([row for _, row in parts], seconds, whole)))
        if machine == before:
            break
    ratios = [step.seconds / guess(shape, step, machine) for step in steps]
    return machine.slower(mean(min(ratio, MOST_DISTURBED) for ratio in ratios))


def amounts(shape: Shape, step: Step, machine: Machine) -> tuple[float, list[float]]:
    """The seconds of a step that are known, to read the weights; and how much it has of
    what `with_costs` gives a cost. Of two that overlap, the shorter one counts in part."""
    work = work_of(shape, step.items, step.sampled)
    weights, products, keys, scores = machine.parts(work)
    of_weights, of_products = shown(machine, weights, products)
    of_keys, of_scores = shown(machine, keys, scores)
    num_chunks = sum(num_tokens > 1 for num_tokens, _ in step.items)
    row = [
        1.0,
        float(len(step.items)),
        float(shape.layers * num_chunks),
        (work.flops - work.attention_flops) * of_products,
        work.kv_bytes * of_keys,
        work.attention_flops * of_scores,
    ]
    return weights * of_weights, row


def shown(machine: Machine, reading: float, computing: float) -> tuple[float, float]:
    """The share of each that `together` counts: all of the longer one."""
    rest = 1 - machine.overlap
    return (1.0, rest) if reading >= computing else (rest, 1.0)


def with_costs(
    machine: Machine,
    step: float,
    sequence: float,
    chunk: float,
    product_flop: float,
    kv_byte: float,
    attention_flop: float,
) -> Machine:
    """The machine with these seconds per step, per sequence, and so on."""
    flops_per_second = machine.hardware.flops_per_second
    bytes_per_second = machine.hardware.bytes_per_second
    return replace(
        machine,
        seconds_per_step=step,
        seconds_per_sequence=sequence,
        seconds_per_chunk=chunk,
        flops_share=share_of(flops_per_second, product_flop),
        attention_bandwidth_share=share_of(bytes_per_second, kv_byte),
        attention_flops_share=share_of(flops_per_second, attention_flop),
    )


def share_of(ceiling: float, seconds: float) -> float:
    """Of a rate per second, what is reached if one unit takes `seconds`."""
    return 1 / (max(seconds, TINY) * ceiling)


def errors_of(shape: Shape, steps: Sequence[Step], machine: Machine) -> dict[str, float]:
    """Of the machine's guesses for these steps: the mean of |error|, and the error of their sum."""
    guesses = [guess(shape, step, machine) for step in steps]
    relative = [abs(one / step.seconds - 1) for one, step in zip(guesses, steps)]
    return {"mean": mean(relative), "sum": sum(guesses) / sum(s.seconds for s in steps) - 1}


def guess(shape: Shape, step: Step, machine: Machine) -> float:
    return machine.seconds(shape, step.items, step.sampled, 0, 0, 16)


def calibrated(
    shape: Shape, steps: Sequence[Step], start: Machine
) -> tuple[Machine, dict[str, dict[str, float]]]:
    """The machine that describes these steps best, and the errors by overlap."""
    machines = {overlap: fitted(shape, steps, start, overlap) for overlap in OVERLAPS}
    errors = {overlap: errors_of(shape, steps, one) for overlap, one in machines.items()}
    best = min(OVERLAPS, key=lambda overlap: errors[overlap]["mean"])
    return machines[best], {str(overlap): error for overlap, error in errors.items()}


# --- runs ---


def new_engine(options: Options) -> LLM:
    """Nothing is in its cache, but all pages were touched, as after some minutes of serving. The
    system gives a page of memory when it is touched first, and the step waits for it. The garbage
    collector leaves alone what is there, as in a server."""
    llm = LLM(**OPTIONS | options)
    llm.runner.kv_cache.tensor.zero_()
    gc.collect()
    gc.freeze()
    return llm


class Cells(NamedTuple):
    """Short runs: for each number of requests and mean length of prompts, up to a number of
    tokens."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    most_tokens: int

    def pairs(self) -> list[tuple[int, int]]:
        return [
            (batch, prompt)
            for batch in self.batches
            for prompt in self.prompts
            if batch * prompt <= self.most_tokens
        ]


ON_CPU = Cells((1, 2, 4, 8, 16, 32, 64), (16, 64, 200, 600, 1000), 10_000)
ON_GPU = Cells((1, 4, 16, 64, 128, 256), (16, 200, 1000, 3000), 100_000)
MOST_OUTPUTS = 60
SECONDS_BETWEEN = 0.02  # on average


def calibration_steps(llm: LLM, seed: int, cells: Cells) -> list[Step]:
    """Steps of short runs, one for each of the cells, in random order, with up to 60 tokens to
    answer. Half of the requests come in the same moment, the others one by one.

    Many prompts are short and a few are long, as users send them. Neither equal lengths nor equal
    steps would tell what a real load costs: attention on a CPU pads the contexts that it computes
    together, and a step that follows others of its kind is faster.
    """
    rng = random.Random(seed)
    steps: list[Step] = []
    pairs = cells.pairs()
    for batch, prompt in rng.sample(pairs, len(pairs)):
        lengths = [
            (prompt_length(rng, prompt, cells), rng.randint(1, MOST_OUTPUTS)) for _ in range(batch)
        ]
        gaps = [rng.expovariate(1 / SECONDS_BETWEEN) for _ in range(batch // 2)]
        times = [0.0] * (batch - batch // 2) + [*accumulate(gaps)]
        jobs = workload(times, lengths, batch)
        steps += record(llm, jobs)[1]
        llm.reset_prefix_cache()
    return steps


def prompt_length(rng: random.Random, mean: int, cells: Cells) -> int:
    """Exponential: the chance of one more token is always the same."""
    return min(1 + int(rng.expovariate(1 / mean)), 2 * max(cells.prompts))


def warm_up(llm: LLM) -> None:
    """The first steps of a process are slow."""
    record(llm, workload(all_at_once(), fixed(50, 20), 20))
    llm.reset_prefix_cache()


def weights_rate(llm: LLM) -> float:
    """Bytes per second of all products with weights, if each has one row: the median of some
    rounds."""
    runner = llm.runner
    layers = [module for module in runner.model.modules() if isinstance(module, Linear)]
    dtype = layers[0].weight.dtype
    sizes = [layer.weight.shape for layer in layers]
    rows = [torch.ones(1, n, dtype=dtype, device=runner.device) for _, n in sizes]
    num_bytes = sum(m * n for m, n in sizes) * dtype.itemsize

    def multiply() -> None:
        for row, layer in zip(rows, layers):
            layer(row)

    with torch.inference_mode():
        return num_bytes / median(seconds_of(multiply, runner.device) for _ in range(50))


def host_rate(llm: LLM) -> float:
    """Bytes per second from the KV cache to where swapped blocks wait: the median of some
    copies."""
    runner, cache = llm.runner, llm.runner.host_cache
    assert cache is not None
    swaps = {i: i for i in range(min(MOST_SWAPPED, len(cache.blocks)))}
    seconds = median(seconds_of(lambda: cache.swap_out(swaps), runner.device) for _ in range(20))
    return len(swaps) * runner.shape.block_bytes / seconds


def start_of(llm: LLM) -> Machine:
    """What is measured by itself: the hardware, how fast weights are read, and swaps. The engine
    must have room on the host."""
    device = llm.runner.device
    ceilings = this_machine(device, llm.runner.model.lm_head.weight.dtype)
    here = f"measured on {ceilings.name}, torch {torch.__version__}"
    fitted_here = f"fitted to steps on {ceilings.name}"
    sources = dict.fromkeys(("hardware", "bandwidth_share", "host_bytes_per_second"), here)
    return Machine(
        ceilings._replace(source=here),
        bandwidth_share=weights_rate(llm) / ceilings.bytes_per_second,
        host_bytes_per_second=host_rate(llm),
        sources=sources | dict.fromkeys(FITTED, fitted_here),
    )


FITTED = (
    "seconds_per_step",
    "seconds_per_sequence",
    "seconds_per_chunk",
    "flops_share",
    "attention_bandwidth_share",
    "attention_flops_share",
    "overlap",
)


# --- the command ---

VARIANTS = {
    f"{dtype}, {threads} thread{'s' * (threads > 1)}": (dtype, threads)
    for threads in (1, 2)
    for dtype in ("float32", "bfloat16")
}


def calibrate(options: Options, cells: Cells, rounds: int) -> dict:
    """A machine, and how well it describes the steps, as JSON has them."""
    llm = new_engine(SWAP | options)
    warm_up(llm)
    steps = [step for seed in range(rounds) for step in calibration_steps(llm, seed, cells)]
    machine, errors = calibrated(shape_of_model(options), steps, start_of(llm))
    return {"machine": asdict(machine), "steps": len(steps), "errors": errors}


def shape_of_model(options: Options) -> Shape:
    own = OPTIONS | options
    itemsize = 4 if own["dtype"] == "float32" else 2
    return shape_of(model_config(own.get("model", EMBEDDED_MODEL)), itemsize)


def apart(name: str, rounds: int, most_tokens: int) -> dict:
    """One variant, in a process with so many threads."""
    dtype, threads = VARIANTS[name]
    command = [sys.executable, "-m", "tutorials.measure.calibrate", "--one", dtype]
    done = subprocess.run(
        [*command, "--rounds", str(rounds), "--most-tokens", str(most_tokens)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    fewest = min(ON_CPU.prompts)
    enough = checked(int, lambda n: n >= fewest, f"an integer, {fewest} or more")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=new_file, help="where the machines are written")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="on a GPU")
    parser.add_argument("--rounds", type=positive, default=2, help="of all short runs")
    parser.add_argument("--most-tokens", type=enough, help="of one of these runs")
    parser.add_argument("--one", metavar="DTYPE", help="print one machine, of this process")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available() and not args.one
    cells = ON_GPU if has_gpu else ON_CPU
    most_tokens = args.most_tokens or cells.most_tokens
    cells = cells._replace(most_tokens=most_tokens)
    if args.one:
        print(json.dumps(calibrate({"dtype": args.one}, cells, args.rounds)))
        return
    if has_gpu:
        options = OPTIONS_OF_GPU | {"model": args.model}
        found = {"bfloat16, GPU": calibrate(options, cells, args.rounds)}
    else:
        found = {name: apart(name, args.rounds, most_tokens) for name in VARIANTS}
    device = torch.device("cuda" if has_gpu else "cpu")
    report = environment() | {
        "device": device_name(device),
        "versions": {name: installed(name) for name in ("torch", "transformers")},
        "machines": {name: one.pop("machine") for name, one in found.items()},
        "fits": found,
    }
    for name, fit in report["fits"].items():
        print(f"{name}: {fit['steps']} steps, errors by overlap {fit['errors']}")
    if args.file:
        write_json(report, args.file)


if __name__ == "__main__":
    main()
