"""`bench.py threads`: tokens per second by the number of threads, on a quiet machine and on one
that is busy.

The embedded model, 8 requests as in example.py and 64 at once; every setting in a process of its
own, in turns. Busy means one endless loop per processor beside the engine.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

from tutorials.machine import ROOT, device_name, environment, installed
from tutorials.report import aligned, percentile

# OMP_NUM_THREADS; engines before had "all"
CHOICES = {"as many as are free": None, "one": "1", "all": str(os.cpu_count())}


def worker() -> None:
    """Prints the speeds of one setting: {number of requests: output tokens per second}."""
    from example import QUESTIONS
    from nanovllm import LLM, SamplingParams

    llm, speeds = LLM(), {}
    for count in (8, 64):
        chats = [
            [{"role": "user", "content": QUESTIONS[i % 8] + "?" * (i // 8)}] for i in range(count)
        ]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.chat(chats[:2], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)  # warm-up
        before = llm.stats()
        llm.chat(chats, params, use_tqdm=False)
        after = llm.stats()
        tokens, seconds = (after[name] - before[name] for name in ("output_tokens", "seconds"))
        speeds[count] = tokens / seconds
    print(json.dumps(speeds))


def speeds_of(choice: str) -> dict[str, float]:
    environ = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    }
    if CHOICES[choice] is not None:
        environ["OMP_NUM_THREADS"] = CHOICES[choice]
    command = [sys.executable, "-m", "measure.threads"]
    out = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    ).stdout
    return json.loads(out.splitlines()[-1])


# It ends with the process that has started it, however and whenever that ends.
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""


@contextmanager
def endless_loop():
    process = subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(args) -> dict:
    """`bench.py threads`: prints the medians, and returns the report."""
    import torch

    report = environment() | {
        "device": device_name(torch.device("cpu"), os.cpu_count()),
        "model": "tiny_qwen3",
    }
    report |= {"versions": {name: installed(name) for name in ("torch",)}, "threads": {}}
    for load in ("quiet", "busy"):
        with ExitStack() as stack:
            for _ in range(os.cpu_count() if load == "busy" else 0):
                stack.enter_context(endless_loop())
            runs = [{choice: speeds_of(choice) for choice in CHOICES} for _ in range(args.repeat)]
        for choice in CHOICES:
            speeds = {count: [run[choice][count] for run in runs] for count in ("8", "64")}
            report["threads"][f"{load}, {choice}"] = speeds
    print(f"{report['model']}, {report['device']}: output tokens per second\n")
    print(aligned(rows(report)))
    return report


def rows(report: dict) -> list[list[str]]:
    """Medians, and in brackets the slowest and the fastest run."""
    found = [["machine, threads", "8 requests", "64 requests"]]
    for setting, speeds in report["threads"].items():
        cells = [
            f"{percentile(s, 50):,.0f} ({min(s):,.0f} to {max(s):,.0f})" for s in speeds.values()
        ]
        found.append([setting, *cells])
    return found


if __name__ == "__main__":
    worker()
