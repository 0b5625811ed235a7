"""How fast are 8 and 4 bits? Our engine in several forms, and vLLM, alive together, in turns.

    python -m tutorials.measure.small_numbers MODEL --vllm vllm/bin/python --w8a8 MODEL8 \
        --json tutorials/results/small_numbers.json

MODEL is a directory: `python bench.py --random-weights qwen3-0.6b` writes one. MODEL8 is the same model with weights
and activations in 8 bits, in the format compressed-tensors, for vLLM. A load is a number of requests that come
at once. In each round, all engines answer each load; the first two rounds warm up.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from tutorials.arguments import checked, experiment, positive
from tutorials.machine import environment
from tutorials.measure.engines import Job
from tutorials.measure.turns import WARM_UP, Turns
from tutorials.report import markdown, write_json
from tutorials.simulation.requests import random_requests

ENGINES = {
    "nanovllm": "nanovllm",
    "nanovllm-int8": "int8",
    "nanovllm-int4": "int4",
    "vllm": "vLLM",
    "vllm-w8a8": "vLLM, 8 bits",
}
LOADS = [1, 8, 16, 64]  # requests
TOKENS = (16, 32)  # in, and out
FOLLOWED = ("dtype", "device", "kv_tokens", "kv_bytes", "batch_tokens")  # by vLLM


def measured(args) -> dict:
    vocab_size = json.loads((args.model / "config.json").read_bytes())["vocab_size"]
    requests = random_requests(max(LOADS), *TOKENS, 0, vocab_size, float("inf"))
    job = Job(
        str(args.model), "nanovllm", requests, vocab_size, max_model_len=512, dtype=args.dtype
    )
    given = {"vllm": args.vllm, "vllm-w8a8": args.vllm and args.w8a8}
    names = [name for name in ENGINES if given.get(name, True)]
    speeds: dict[str, dict] = {name: {load: [] for load in LOADS} for name in names}
    with Turns({"vllm": args.vllm, "vllm-w8a8": args.vllm}) as turns:
        for name in names:
            model = args.w8a8 if name == "vllm-w8a8" else job.model
            facts = turns.start(replace(job, engine=name, model=str(model)))
            if name == "nanovllm":
                ours = facts
                job = replace(job, **{key: facts[key] for key in FOLLOWED})
        for number in range(WARM_UP + args.rounds):
            for load in LOADS:
                output_tokens = sum(request.max_tokens for request in requests[:load])
                for name in turns.order(number):
                    seconds = turns.turn(name, "round", number, load)["seconds"]
                    speeds[name][load].append(output_tokens / seconds)
                now = {name: f"{speeds[name][load][-1]:.1f}" for name in names}
                print(number, load, now, file=sys.stderr, flush=True)
    return environment() | {
        "device": ours["device_name"],
        "cpu_capability": ours["cpu_capability"],
        "model": args.model.name,
        "dtype": ours["dtype"],
        "vllm": turns.workers["vllm"].facts["version"] if args.vllm else None,
        "tokens": TOKENS,
        "rounds": args.rounds,
        "foreign_cpu_share": fmean(turns.foreign_shares),
        "speeds": {
            name: {str(load): runs[WARM_UP:] for load, runs in of_loads.items()}
            for name, of_loads in speeds.items()
        },
    }


def rows(report: dict) -> list[list[str]]:
    """The table of chapter 21: tokens/s, and how many times as fast as vLLM within a round."""
    speeds = report["speeds"]
    table = [["requests", *(ENGINES[name] for name in speeds)]]
    for load, base in speeds["vllm"].items():
        cells = [load]
        for name in speeds:
            ratios = [ours / vllm for ours, vllm in zip(speeds[name][load], base)]
            cells.append(f"{median(speeds[name][load]):,.0f}")
            if name != "vllm":
                cells[-1] += f", {median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
        table.append(cells)
    return table


def main() -> None:
    parser = experiment(__doc__)
    directory = checked(Path, Path.is_dir, "a directory")
    parser.add_argument("model", type=directory)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--w8a8", type=directory, metavar="MODEL8")
    parser.add_argument("--rounds", type=positive, default=7)
    args = parser.parse_args()
    report = measured(args)
    write_json(report, args.json)
    if args.vllm:
        print(markdown(rows(report)))


if __name__ == "__main__":
    main()
