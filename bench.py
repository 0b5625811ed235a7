"""Throughput of the engine, and of its peers on the same requests in the same run.

    python bench.py                                    # embedded model, 64 requests, seconds on a laptop
    python bench.py --peer hf --json tutorials/results/cpu_embedded.json
    python bench.py --model Qwen/Qwen3-0.6B --requests 16 --tokens 64 256

Prompts are random token ids and every request gets exactly the number of tokens that it asks for, so that all
engines do the same work. `hf` is transformers' `generate` on one batch, padded on the left, as long as its
longest request; tokens beyond what a request asked for do not count.
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from nanovllm import LLM, SamplingParams

Request = tuple[list[int], int]  # prompt token ids, number of tokens to generate


def make_requests(count: int, low: int, high: int, vocab_size: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(vocab_size) for _ in range(rng.randint(low, high))], rng.randint(low, high))
        for _ in range(count)
    ]


def run_nanovllm(llm: LLM, requests: list[Request]) -> tuple[list[list[int]], float, dict]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    stats = {key: llm.stats()[key] for key in ("steps", "kv_blocks_used_peak", "preemptions")}
    return [output.outputs[0].token_ids for output in outputs], seconds, stats


@torch.inference_mode()
def run_hf(model, requests: list[Request]) -> tuple[list[list[int]], float, dict]:
    longest, steps = max(len(prompt) for prompt, _ in requests), max(n for _, n in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    start = time.perf_counter()
    out = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=steps,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    seconds = time.perf_counter() - start
    return [row[longest : longest + n] for row, (_, n) in zip(out.tolist(), requests)], seconds, {"steps": steps}


def environment() -> dict:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    is_cuda = torch.cuda.is_available()
    return {
        "command": "python " + " ".join(sys.argv),
        "commit": commit,
        "device": torch.cuda.get_device_name() if is_cuda else f"{cpu_name()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(": ")[2] if names else platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or directory; default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs=2, default=[16, 128], metavar=("MIN", "MAX"), help="in and out")
    parser.add_argument("--peer", choices=["hf"], help="also run this engine")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine in turn; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()

    options = {"model": args.model} if args.model else {}
    llm = LLM(**options, dtype=args.dtype, enable_prefix_caching=False)  # else a repeated run would find its prompts
    requests = make_requests(args.requests, *args.tokens, llm.runner.vocab_size, args.seed)
    engines = {"nanovllm": lambda: run_nanovllm(llm, requests)}
    if args.peer == "hf":
        model = transformers.AutoModelForCausalLM.from_pretrained(llm.config.model, dtype=llm.runner.dtype)
        model = model.to(llm.runner.device).eval()
        model.generation_config.eos_token_id = None  # go on after it, as ignore_eos does
        engines["hf"] = lambda: run_hf(model, requests)

    warm_up = [(prompt[:4], 2) for prompt, _ in requests[:2]]
    run_nanovllm(llm, warm_up)
    results, tokens = {}, {}
    for _ in range(args.repeat):
        for name, run in engines.items():
            tokens[name], seconds, stats = run()
            results.setdefault(name, {"seconds": [], **stats})["seconds"].append(round(seconds, 3))
    output_tokens = sum(n for _, n in requests)
    for result in results.values():
        median = sorted(result["seconds"])[len(result["seconds"]) // 2]
        result["output_tokens_per_second"] = round(output_tokens / median, 1)
    report = environment() | {"requests": len(requests), "output_tokens": output_tokens, "engines": results}
    if "hf" in results:
        same = sum(a == b for a, b in zip(tokens["nanovllm"], tokens["hf"]))
        report["requests_with_the_same_tokens"] = same
        speeds = [results[name]["output_tokens_per_second"] for name in ("nanovllm", "hf")]
        report["times_hf"] = round(speeds[0] / speeds[1], 2)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
