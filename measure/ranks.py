"""Two ranks beside one: tokens per second, what the ranks say to each other, and what each holds.

    python -m measure.ranks --json tutorials/results/cpu_ranks.json

One rank has two threads, two ranks have one each. All settings take turns; each run is in a process
of its own. `floor` is what gloo alone takes for messages of the same sizes.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from tutorials.arguments import experiment
from tutorials.machine import ROOT, device_name, environment, installed
from tutorials.report import markdown, median, percentile, write_json

COUNTS = (1, 64, 256)  # requests
PROMPT = 40  # tokens
SETTINGS = {"one rank, two threads": (1, 2), "two ranks, one thread each": (2, 1)}


class Times:
    """Calls of a function, in microseconds."""

    def __init__(self, owner: object, name: str):
        self.plain = getattr(owner, name)
        self.values: list[float] = []
        setattr(owner, name, self)

    def __call__(self, *args):
        begin = time.perf_counter()
        try:
            return self.plain(*args)
        finally:
            self.values.append(1e6 * (time.perf_counter() - begin))

    def median(self) -> float:
        values = self.values
        self.values = []
        return percentile(values, 50)


def work(size: int, num_tokens: int) -> None:
    """Prints the numbers of one run as JSON."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.parallel import runner as parallel

    llm = LLM(tensor_parallel_size=size)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    times = {}
    if size > 1:
        group = llm.runner.group
        times = {
            "pack": Times(parallel, "packed"),
            "tell": Times(group, "tell"),
            "add_up": Times(group, "add_up"),
            "gather": Times(group, "gather"),
        }
    llm.generate([[5] * PROMPT], params, use_tqdm=False)
    report: dict = {}
    for count in COUNTS:
        for one in times.values():
            one.values.clear()
        prompts = [[5 + i % 1000] * PROMPT for i in range(count)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        report[str(count)] = {"tokens_per_second": count * num_tokens / seconds}
        report[str(count)] |= {f"{name}_us": one.median() for name, one in times.items()}
    model = llm.runner.model
    report["parameters"] = sum(weight.numel() for weight in {*model.parameters()})
    if size > 1:
        report["floor"] = floor()
    print(json.dumps(report))


def floor() -> dict:
    """The other rank answers to steps only, so gloo alone is measured in processes of its own."""
    command = [sys.executable, "-m", "measure.ranks", "--work", "floor"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return json.loads(output)


def work_as_floor(port: int | None, num_calls: int = 300) -> None:
    """Two processes that only send: an all-reduce of one and of 256 rows, and a step's message."""
    import torch
    import torch.distributed as dist

    from nanovllm.parallel.ranks import Group
    from nanovllm.parallel.runner import FIRST

    if port is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "measure.ranks", "--work", "floor"]
        other = subprocess.Popen([*command, "--port", str(store.port)], cwd=ROOT)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group = Group(store, int(port is not None), 2, "127.0.0.1")
    group.connect(torch.device("cpu"))
    report = {}
    for name, rows in {"add_up_1_us": 1, "add_up_256_us": 256}.items():
        times = Times(group, "add_up")
        for _ in range(num_calls):
            group.add_up(torch.zeros(rows, 192))
        group.add_up = times.plain
        report[name] = times.median()
    times = Times(group, "tell")
    for _ in range(num_calls):
        group.tell(torch.zeros(FIRST, dtype=torch.int64))
        group.add_up(torch.zeros(1))  # so that messages do not queue up
    report["tell_us"] = times.median()
    if port is None:
        print(json.dumps(report))
        other.wait()


def run(size: int, num_threads: int, num_tokens: int) -> dict:
    command = [sys.executable, "-m", "measure.ranks", "--work", str(size)]
    output = subprocess.run(
        [*command, "--tokens", str(num_tokens)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return json.loads(output)


def measure(args) -> dict:
    import torch

    report = environment() | {"device": device_name(torch.device("cpu"), 2)}
    report["versions"] = {"torch": installed("torch")}
    report |= {"prompt": PROMPT, "tokens": args.tokens, "repeat": args.repeat}
    runs: dict[str, list[dict]] = {name: [] for name in SETTINGS}
    for _ in range(args.repeat):
        for name, (size, num_threads) in SETTINGS.items():
            runs[name].append(run(size, num_threads, args.tokens))
    report["runs"] = {name: median(some) for name, some in runs.items()}
    return report


WORDS = {
    "pack": "to pack a step",
    "tell": "to tell it",
    "add_up": "an all-reduce, 11 in a step",
    "gather": "to gather the logits",
}


def text(report: dict) -> str:
    """Markdown: two ranks beside one, and what they say to each other."""
    _, two = report["runs"].values()
    counts = [name for name in two if name.isdigit()]
    rows = [["", *(f"{count} requests" for count in counts)]]
    for name, run in report["runs"].items():
        rows.append([f"{name}: tokens/s", *(f"{run[i]['tokens_per_second']:,.0f}" for i in counts)])
    for name, words in WORDS.items():
        rows.append([f"{words} (ms)", *(f"{two[i][f'{name}_us'] / 1e3:.2f}" for i in counts)])
    floor = {name: f"{value / 1e3:.2f}" for name, value in two["floor"].items()}
    alone = (
        f"Gloo alone, between two processes that do nothing else: {floor['tell_us']} ms to tell, "
        f"{floor['add_up_1_us']} and {floor['add_up_256_us']} ms for an all-reduce of 1 and of 256 rows."
    )
    return f"{markdown(rows)}\n\n{alone}"


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work == "floor":
        work_as_floor(args.port)
    elif args.work:
        work(int(args.work), args.tokens)
    else:
        report = measure(args)
        print(text(report))
        write_json(report, args.json)


if __name__ == "__main__":
    main()
