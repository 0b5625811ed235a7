"""Two programs that measure servers, unchanged, against `nanovllm serve`: vLLM's `vllm bench serve`, and lm-eval.

They are no dependencies: each has an environment of its own.

    python -m tutorials.serving.clients --vllm venv/bin/vllm --lm-eval venv/bin/lm_eval --json tutorials/results/cpu_serving_clients.json
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import torch

from nanovllm.config import EMBEDDED_MODEL
from tutorials.machine import device_name, environment, installed

TASKS = Path(__file__).parent / "lm_eval_tasks"
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
NUM_PROMPTS = 60
NUM_OUTPUT_TOKENS = 60


@contextmanager
def server() -> Iterator[str]:
    """The URL of `nanovllm serve`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", str(port)]
    process = subprocess.Popen([*command, "--served-model-name", "tiny"])
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            if process.poll() is not None:
                raise SystemExit(f"the server has ended with status {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(f"{url}/health"):
            return True
    except URLError:
        return False


def bench(vllm: str, url: str, backend: str, folder: Path) -> dict:
    """What `vllm bench serve` finds, with the lengths of its lists."""
    file = folder / f"{backend}.json"
    options = {
        "--backend": backend,
        "--endpoint": ENDPOINTS[backend],
        "--base-url": url,
        "--model": "tiny",
        "--tokenizer": EMBEDDED_MODEL,
        "--dataset-name": "random",
        "--random-input-len": "100",
        "--random-output-len": str(NUM_OUTPUT_TOKENS),
        "--num-prompts": str(NUM_PROMPTS),
        "--request-rate": "8",
        "--result-filename": str(file),
    }
    flags = ["--ignore-eos", "--save-result", "--save-detailed"]
    command = [vllm, "bench", "serve", *flags]
    for name, value in options.items():
        command += [name, value]
    subprocess.run(command, check=True, cwd=folder)
    result = json.loads(file.read_bytes())
    num_samples = sum(len(times) for times in result["itls"])
    num_tokens = sum(result["output_lens"])
    names = ("completed", "failed", "request_throughput", "output_throughput")
    names += ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    assert num_samples == num_tokens - NUM_PROMPTS, (num_samples, num_tokens)
    return {
        "endpoint": ENDPOINTS[backend],
        "output_tokens": num_tokens,
        "inter_token_samples": num_samples,
        **{name: result.get(name) for name in names},
    }


def write_sums(file: Path, count: int = 60) -> None:
    """Questions that the embedded model can answer, each with three wrong answers beside."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(count):
            a = rng.randrange(10, 500)
            b = rng.randrange(10, 500)
            results = [a + b, a + b + 10, a + b - 10, a + b + 1]
            rng.shuffle(results)
            question = {
                "question": f"what is {a} + {b}?",
                "answer": f"{a} + {b} = {a + b}",
                "choices": [f"{a} + {b} = {result}" for result in results],
                "gold": results.index(a + b),
            }
            lines.write(json.dumps(question) + "\n")


def lm_eval(program: str, url: str, folder: Path) -> dict:
    """Accuracies by log-likelihoods (echo and logprobs), and by generated text."""
    write_sums(folder / "sums.jsonl")
    model = {
        "model": "tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer": EMBEDDED_MODEL,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 8,
        "max_retries": 1,
    }
    arguments = ",".join(f"{name}={value}" for name, value in model.items())
    command = [program, "--model", "local-completions", "--model_args", arguments]
    command += ["--include_path", str(TASKS), "--tasks", "sums_choice,sums_generate"]
    subprocess.run([*command, "--output_path", str(folder / "out")], check=True, cwd=folder)
    (file,) = (folder / "out").rglob("results_*.json")
    results = json.loads(file.read_bytes())["results"]
    return {
        "sums_choice": results["sums_choice"]["acc,none"],
        "sums_generate": results["sums_generate"]["exact_match,none"],
    }


def version_in(program: str, package: str) -> str:
    """Of a package in the environment of a program."""
    python = Path(program).parent / "python"
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm", help="vLLM's program")
    parser.add_argument("--lm-eval", help="lm-eval's program")
    parser.add_argument("--json", help="where to write the results")
    args = parser.parse_args()
    report = environment()  # but the command: where the programs are is this machine's business
    report["command"] = "python -m tutorials.serving.clients --vllm ... --lm-eval ..."
    report["device"] = device_name(torch.device("cpu"))
    report["versions"] = {name: installed(name) for name in ("torch", "fastapi", "uvicorn")}
    with tempfile.TemporaryDirectory() as name, server() as url:
        folder = Path(name)
        if args.vllm:
            report["versions"]["vllm"] = version_in(args.vllm, "vllm")
            report["vllm bench serve"] = [bench(args.vllm, url, b, folder) for b in ENDPOINTS]
        if args.lm_eval:
            report["versions"]["lm-eval"] = version_in(args.lm_eval, "lm_eval")
            report["lm-eval accuracy"] = lm_eval(args.lm_eval, url, folder)
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
