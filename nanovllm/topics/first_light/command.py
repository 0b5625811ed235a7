"""First light: the first minutes of the engine on a GPU. What the GPU is, whether each part of the
engine is right on it, and how fast a decode is beside the GPU's memory.

Each part is a process of its own: after a crash of a kernel, a process cannot use the GPU. What is
found is printed, and written into one JSON file that can be sent as an issue.
"""

import json
import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from subprocess import PIPE, Popen, getoutput
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Timer
from timeit import repeat
from typing import Any, NamedTuple

SECONDS = 120.0  # that a part may take
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "vocab_size": 512,
}
FEW_EXPERTS = {"num_experts": 16, "moe_intermediate_size": 64}
QWEN3_5 = {  # in which Qwen3.5-0.8B differs from Qwen3-0.6B
    "model_type": "qwen3_5_text",
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 16,
    "vocab_size": 248320,
}
# of each family, a model and what is changed in it: an eighth of a model with experts is 10 GB
OF_FAMILY: dict[str, tuple[str, dict]] = {
    "dense": ("qwen3-0.6b", {}),
    "moe": ("qwen3-30b-a3b", {"num_hidden_layers": 6}),
    "hybrid": ("qwen3-0.6b", QWEN3_5),
}
TORCH = {"attention_backend": "torch", "enforce_eager": True}
TRITON = {"attention_backend": "triton", "enforce_eager": True}
GRAPHS = {"attention_backend": "triton", "enforce_eager": False}
ANSWERS = {
    "what is 347 + 285?": "347 + 285 = 632",
    "what is 12 + 30?": "12 + 30 = 42",
    "reverse: apple river stone": "stone river apple",
    "sort 5, 3, 9": "3, 5, 9",
}


def machine(options: dict, is_small: bool) -> dict[str, Any]:
    import torch

    packages = ("torch", "triton", "transformers", "nanovllm")
    facts: dict[str, Any] = {name: version(name) for name in packages}
    facts["python"] = platform.python_version()
    facts["system"] = platform.platform()
    if not is_small:
        gpu = torch.cuda.get_device_properties(0)
        facts["gpu"] = gpu.name
        facts["capability"] = f"sm_{gpu.major}{gpu.minor}"
        facts["memory_gib"] = round(gpu.total_memory / 2**30, 1)
        facts["cuda"] = torch.version.cuda
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        facts["driver"] = getoutput(query)
    return facts


def answers(options: dict, is_small: bool) -> dict[str, Any]:
    """The constructor compares all kernels with PyTorch, and one recorded step with the model."""
    from nanovllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(check_kernels="always", **options)
    seconds = time.perf_counter() - begin
    chats = [[{"role": "user", "content": question}] for question in ANSWERS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    wrong = {q: text for q, text in zip(ANSWERS, texts) if text != ANSWERS[q]}
    result = {"start_seconds": round(seconds, 1), "dtype": str(llm.runner.dtype)}
    if wrong:
        result["error"] = f"wrong answers: {wrong}"
    return result


def speed(options: dict, is_small: bool, name: str = "dense") -> dict[str, Any]:
    """Where the time of a decode goes, with few and with many sequences."""
    from nanovllm import LLM
    from nanovllm.topics.simulator.cost_model import SHAPES, shape_of  # chapter 14

    real, changes = OF_FAMILY[name]
    shape = SHAPES[real] | changes | {"max_position_embeddings": 4096}
    device = "cpu" if is_small else "cuda"
    copied = bytes_per_second(device, is_small)
    facts: dict = {"shape": name, "copy_gb_per_second": copied / 1e9}
    layers = 2 if name == "hybrid" else 1  # one of each kind
    if is_small:
        shape |= SMALL | {"num_hidden_layers": layers} | (FEW_EXPERTS if name == "moe" else {})
    with TemporaryDirectory() as folder:
        write_model(Path(folder), shape, device)
        llm = LLM(folder, **options)
    costs = shape_of(shape, llm.runner.dtype.itemsize)
    room = llm.runner.num_blocks * llm.runner.shape.block_size // 640  # requests
    batches = [1, 2] if is_small else [batch for batch in (1, 16, 64, 256) if batch <= room]
    for batch in batches:
        run_only(llm, batch, 8 if is_small else 256)
        not_hit = (costs.experts - costs.hit(batch)) * costs.expert
        not_read = round(not_hit) * costs.itemsize
        count = 4 if is_small else 40
        facts[f"{batch} sequences"] = speed_of(llm, batch, copied, count, not_read)
        print(json.dumps(facts), flush=True)
    # after all times: steps may be slower once there was a profiler
    for batch in reversed(batches):
        run_only(llm, batch, 0)
        kernels = kernels_of(llm, 4)
        busy_ms = sum(us for us, *_ in kernels) / 1e3
        found = facts[f"{batch} sequences"]
        if busy_ms:  # on a CPU there are no kernels
            found |= {"gpu_ms": busy_ms, "host_share": 1 - busy_ms / found["step_ms"]}
            found["kernels"] = kernels[:16]
    return facts


def speed_of(llm: Any, batch: int, copied: float, count: int, not_read: int = 0) -> dict:
    """The median of `count` steps, with overlap beside the time of reading the bytes: of all
    weights, but those of experts that are most likely not hit."""
    alone, _ = median_step(llm, count, overlap=False)
    seconds, num_tokens = median_step(llm, count, overlap=True)
    weights = llm.runner.model.parameters()
    num_bytes = sum(weight.nbytes for weight in weights) - not_read
    num_bytes += num_tokens * llm.runner.shape.block_bytes // llm.runner.shape.block_size
    shape = llm.runner.shape  # each state is read and written
    num_bytes += 2 * batch * shape.state_bytes // (shape.num_slots + 1)
    return {
        "tokens_per_second": round(batch / seconds),
        "step_ms": 1e3 * seconds,
        "step_ms_without_overlap": 1e3 * alone,
        "share_of_roofline": num_bytes / copied / seconds,
    }


def run_only(llm: Any, batch: int, length: int) -> None:
    """Adds requests, or aborts the oldest, so that there are `batch`. Runs steps until all of them
    get tokens in the same step."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0.6, max_tokens=1024, ignore_eos=True)
    running = llm.scheduler.running
    for request in running[:-batch]:
        llm.abort(request.request_id)
    for i in range(len(running), batch):
        llm.add_request([i] * length, params)
    llm.overlaps = False
    while len(llm.step()) != batch:
        pass


def median_step(llm: Any, count: int, overlap: bool) -> tuple[float, int]:
    """Seconds of the median step, and the tokens in the cache in this same step."""
    llm.overlaps = overlap
    steps = []
    for _ in range(count):
        begin = time.perf_counter()
        outputs = llm.step()
        seconds = time.perf_counter() - begin
        tokens = [one.prompt_token_ids + one.outputs[0].token_ids for one in outputs]
        steps.append((seconds, sum(map(len, tokens))))
    return sorted(steps)[count // 2]


def kernels_of(llm: Any, count: int) -> list[tuple[float, float, str]]:
    """The kernels of `count` steps, the longest first: microseconds and launches in one step, and
    the name. On a CPU there are none."""
    from torch.profiler import profile

    with profile() as found:
        for _ in range(count):
            llm.step()
    events = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    return sorted(
        ((e.self_device_time_total / count, e.count / count, e.key[:80]) for e in events),
        reverse=True,
    )


def write_model(folder: Path, shape: dict, device: str) -> None:
    """A model with random weights, made on the device: on a CPU they take most of a minute."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):  # shapes without memory
        model = AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = weights[name] = torch.ones_like(parameter, dtype=torch.bfloat16, device=device)
        if weight.dim() > 1:
            weight.normal_(std=0.02)
    save_file(weights, folder / "model.safetensors")
    config.save_pretrained(folder)


def bytes_per_second(device: str, is_small: bool) -> float:
    """The speed of a copy, which reads and writes."""
    import torch

    source = torch.zeros(2**24 if is_small else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if not is_small:
            torch.cuda.synchronize()

    return 2 * source.nbytes / min(repeat(copy, number=1))


class Part(NamedTuple):
    function: Callable[[dict, bool], dict[str, Any]]
    options: dict[str, Any]  # of LLM
    hint: str  # where to look if only this part fails


PARTS = {  # from what needs least to what is usual
    "machine": Part(machine, {}, "PyTorch or the driver: PyTorch does not reach a GPU"),
    "torch": Part(answers, TORCH, "PyTorch's numbers, or the reading of the model"),
    "triton": Part(answers, TRITON, "a kernel of ours; meanwhile, set attention_backend='torch'"),
    "graphs": Part(answers, GRAPHS, "recorded steps; meanwhile, set enforce_eager=True"),
    "speed": Part(speed, GRAPHS, "too little memory; lower gpu_memory_utilization"),
}


def part_in_process(name: str, is_small: bool, shape: str = "dense") -> Iterator[dict[str, Any]]:
    """Runs a part in a process of its own. Yields its facts, whenever it has found more. The shape
    is that of the part `speed`."""
    command = [sys.executable, "-m", __name__, name, shape, *["--small"] * is_small]
    facts: dict[str, Any] = {}
    with (
        TemporaryFile("w+", encoding="utf-8") as log,
        Popen(command, stdout=PIPE, stderr=log, text=True) as process,
    ):
        timer = Timer(SECONDS * (10 if is_small else 1), process.kill)
        timer.daemon = True
        timer.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                facts = json.loads(line)
                yield facts
        timer.cancel()
        if process.wait():
            log.seek(0)
            errors = log.read()
            *_, last = errors.strip().splitlines() or [f"ended after {SECONDS:.0f} s, or crashed"]
            error = f"exit status {process.returncode}: {last}"
            yield facts | {"error": error, "stderr": errors[-4000:]}


def run(args: Namespace) -> None:
    """Runs all parts, unless there is no GPU. The exit status is 1 if one has failed."""
    import torch

    if not (args.small or torch.cuda.is_available()):
        sys.exit("no GPU here: nothing to try")
    if args.small:
        os.environ["TRITON_INTERPRET"] = "1"
    report: dict[str, dict] = {}
    for name, part in PARTS.items():
        # at once: what is found is kept, and a file that cannot be written is told
        write(report, args.file)
        for found in part_in_process(name, args.small, args.shape):
            report[name] = found
            write(report, args.file)
        facts = {key: value for key, value in report[name].items() if key != "stderr"}
        state = "failed:" if "error" in facts else "works: "
        print(f"{name:8}", state, json.dumps(facts), flush=True)
        if "error" in facts:
            print(f"{'':8} most likely {part.hint}", flush=True)
            if name == "machine":
                break
    print(f"Written: {args.file}. Please send it as an issue, also if all works.")
    sys.exit(any("error" in facts for facts in report.values()))


def write(report: dict, file: str) -> None:
    Path(file).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def add_command(commands: Any) -> None:
    """Adds `first-light` to the commands of a parser."""
    parser = commands.add_parser("first-light", help="try the engine on this machine's GPU")
    parser.add_argument("file", nargs="?", default="first_light.json", help="for the results")
    parser.add_argument("--shape", default="dense", choices=OF_FAMILY, help="of the part `speed`")
    parser.add_argument("--small", action="store_true", help="without a GPU, tiny and interpreted")


if __name__ == "__main__":
    name, shape, *more = sys.argv[1:]
    part = PARTS[name]
    function = partial(speed, name=shape) if name == "speed" else part.function
    print(json.dumps(function(part.options, bool(more))))
