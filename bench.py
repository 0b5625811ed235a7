"""A benchmark that tells the truth: the engine, its peers on the same requests, and what the
machine could do.

    python bench.py                                            # embedded model, seconds on a laptop
    python bench.py --peer hf hf-cb --json tutorials/results/cpu_embedded.json
    python bench.py --peer hf --rounds 3 --cold                # a quick look, also at the first seconds
    python bench.py --random-weights qwen3-0.6b --workload nano-vllm --peer vllm --python vllm=~/vllm/bin/python
    python bench.py --random-weights smollm2-135m --requests 1 --peer llama.cpp-q8_0 --python llama.cpp-q8_0=~/lc/bin/python
    python bench.py --random-weights qwen3-8b --trace AzureLLMInferenceTrace_conv.csv --requests 500 --rate 4
    python bench.py --model Qwen/Qwen3-0.6B --rate 8 --option max_num_seqs=32

Prompts are random token ids and every request gets exactly as many tokens as it asks for, so all
engines do the same work. Each engine runs in a process of its own, as it comes (its own defaults)
but with the same weights, dtype and sampling. All are alive together, and answer the requests in
turns: two rounds to warm up, then those that count, of which the median is shown. Round r adds r to
every token id, so that no prefix cache knows a prompt from the round before. With --first, there
are rounds with some of the requests, too. On a GPU, the engines share its memory.
tutorials/appendix.md explains every column; the parts are in tutorials/measure.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from nanovllm.topics.simulator.cost_model import SHAPES
from tutorials.arguments import checked, positive
from tutorials.machine import environment
from tutorials.measure.checkpoints import model_directory
from tutorials.measure.engines import Job
from tutorials.measure.peers import ENGINES
from tutorials.measure.turns import WARM_UP, Turns
from tutorials.report import conditions, engines_table, summary, write_json
from tutorials.simulation.requests import WORKLOADS, Request, cut, make_requests

FOLLOWED = ("dtype", "device", "kv_tokens", "kv_bytes", "batch_tokens", "threads")  # by the peers


def pair(text: str, parse) -> tuple[str, object]:
    name, value = text.split("=", 1)
    return name, parse(value)


def json_or_text(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def program(name: str) -> str | None:
    """The absolute path of a program, if there is one of this name: workers run in another
    directory."""
    found = shutil.which(os.path.expanduser(name))
    return found and os.path.abspath(found)


def parser() -> argparse.ArgumentParser:
    count = checked(int, lambda n: n >= 0, "0 or a positive integer")
    rate = checked(float, lambda x: x > 0, "a positive number, or inf")
    temperature = checked(float, lambda x: 0 <= x < math.inf, "0 (greedy) or a positive number")
    option = checked(partial(pair, parse=json_or_text), lambda p: p[0].isidentifier(), "NAME=VALUE")
    interpreter = checked(
        partial(pair, parse=program),
        lambda p: p[0] in ENGINES and p[1] is not None,
        f"ENGINE=INTERPRETER, a program that exists and one of {', '.join(ENGINES)}",
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="hub id or directory; default: the embedded model")
    add("--random-weights", choices=SHAPES, help="a model of this shape, written once")
    add(
        "--weights-dir",
        type=Path,
        default=Path("~/.cache/nanovllm"),
        help="where such models are kept",
    )
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add(
        "--max-model-len",
        type=positive,
        help="longer requests are cut; default: what the model was made for",
    )
    add(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of our Config",
    )
    add("--workload", choices=["random", "nano-vllm"], help="default: random")
    add(
        "--trace",
        type=Path,
        metavar="CSV",
        help="with columns TIMESTAMP,ContextTokens,GeneratedTokens",
    )
    add(
        "--rate",
        type=rate,
        default=math.inf,
        help="requests per second on average; default: inf, all at the start",
    )
    add("--requests", type=positive, help="how many; of a trace, the first ones")
    add("--tokens", type=positive, nargs=2, metavar=("MIN", "MAX"), help="in and out")
    add("--temperature", type=temperature, help="default: the workload's")
    add("--seed", type=int, default=0)
    add("--peer", nargs="+", choices=list(ENGINES)[1:], default=[], help="also run these engines")
    add("--python", type=interpreter, action="append", default=[], metavar="ENGINE=INTERPRETER")
    add("--rounds", type=positive, default=9, help="of each engine, after those to warm up")
    add("--warm-up", type=count, default=WARM_UP, help="rounds before those; default: %(default)s")
    add("--first", type=positive, nargs="+", default=[], help="also run only so many requests")
    add("--cold", action="store_true", help="also show the start and the rounds to warm up")
    add("--json", type=Path, help="write the result here")
    return parser


def check(args) -> None:
    """Fills in the workload's defaults. Raises ValueError for options that do not go together."""
    if args.model and args.random_weights:
        raise ValueError("--model and --random-weights are two models: give one")
    if args.trace and (args.workload or args.tokens):
        raise ValueError("--trace is a workload: --workload and --tokens are not allowed with it")
    if args.tokens and args.tokens[0] > args.tokens[1]:
        raise ValueError(
            "--tokens {} {} is not allowed: MIN must be at most MAX".format(*args.tokens)
        )
    able = [name for name, engine in ENGINES.items() if engine.has_arrivals]
    unable = [name for name in args.peer if name not in able]
    if unable and math.isfinite(args.rate):
        raise ValueError(
            f"--peer {unable[0]} takes all requests at once: with --rate, only {', '.join(able)} can run"
        )
    args.workload = "trace" if args.trace else args.workload or "random"
    for name, default in zip(("requests", "tokens", "temperature"), WORKLOADS[args.workload]):
        if getattr(args, name) is None:
            setattr(args, name, default)


def reports(args) -> Iterator[dict]:
    """Runs the engines in turns. Yields what is known after each round that counts, and at the end.
    Raises ValueError for what cannot be."""
    check(args)
    about = environment()
    names = dict.fromkeys(["nanovllm", *args.peer])
    path = model_directory(args)
    config = json.loads((path / "config.json").read_bytes())
    longest = args.max_model_len or config["max_position_embeddings"]
    wanted = make_requests(args, config["vocab_size"])
    requests = [cut(request, max(2, longest)) for request in wanted]
    job = Job(
        engine="nanovllm",
        model=str(path),
        requests=requests,
        vocab_size=config["vocab_size"],
        max_model_len=longest,
        dtype=args.dtype,
        temperature=args.temperature,
        has_rate=math.isfinite(args.rate),
        options=dict(args.option),
        gpu_share=0.9 / len(names),
    )
    with Turns(dict(args.python)) as turns:
        for name in names:
            print(f"{name} starts", file=sys.stderr)
            facts = turns.start(replace(job, engine=name))
            if name == "nanovllm":
                job = replace(job, **{key: facts[key] for key in FOLLOWED})
        for _ in turns.play(args.rounds, args.warm_up, args.first):
            yield about | report_of(args, turns, job, wanted)


def report_of(args, turns: Turns, job: Job, wanted: list[Request]) -> dict:
    """The conditions, and the results of the rounds so far."""
    results = turns.results()
    ours = results["nanovllm"]
    requests = job.requests
    output_tokens = sum(request.max_tokens for request in requests)
    return {
        "device": ours["device_name"],
        "num_threads": ours["threads"],
        "cpu_capability": ours["cpu_capability"],
        "model": Path(job.model).name,
        "dtype": ours["dtype"],
        "options": dict(args.option),
        "workload": args.workload,
        "seed": args.seed,
        "temperature": args.temperature,
        "rate": args.rate if math.isfinite(args.rate) else None,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": output_tokens,
        "max_model_len": job.max_model_len,
        "tokens": args.tokens,
        "rounds": len(ours["runs"]),
        "warm_up": args.warm_up,
        "foreign_cpu_share": fmean(turns.foreign_shares),
        "cold": args.cold,
        "cut_requests": sum(a != b for a, b in zip(requests, wanted)),
        "engines": {
            name: summary(result, ours, output_tokens, args.temperature == 0)
            for name, result in results.items()
        },
    }


def main() -> None:
    arguments = parser()
    args = arguments.parse_args()
    report: dict = {}
    is_ended = False
    try:
        for report in reports(args):
            write_json(report, args.json)
    except ValueError as error:
        arguments.error(str(error))
    except KeyboardInterrupt:  # Ctrl-C, or the end of a time limit
        is_ended = True
    if not report:
        sys.exit("no round has ended")
    print(conditions(report), engines_table(report), sep="\n\n")
    sys.exit(is_ended)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
