"""The first minutes on a GPU, in one command: what runs, whether it is right, how fast it is, and where the time goes.

Each section runs in a process of its own, so that an illegal access or a hanging kernel in one spares the others. Its
results are in a JSON file, written after each case: what has ended is not lost. See the docstrings of the sections.

Run: python -m tests.first_contact [--sections 2,3] [--out first_contact] [--minutes 8]
With --cpu the same code runs without a GPU, in Triton's interpreter with tiny sizes, in about two minutes.
"""

import argparse
import gc
import importlib.util
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import nanovllm.engine
from nanovllm import LLM, SamplingParams, memory, model_runner
from nanovllm.cuda_graphs import DecodeGraphs
from nanovllm.host_cache import HostCache
from nanovllm.layers import attention, torch_ops
from nanovllm.layers.batch import Batch
from nanovllm.layers.sampler import Sampling
from nanovllm.roofline import FIELDS, visible_keys
from nanovllm.schedule import Schedule
from nanovllm.step import StepInputs
from tests.test_attention import random_batch
from tutorials.performance.attention import seconds_per_layer
from tutorials.performance.checkpoints import random_model, write_checkpoint
from tutorials.performance.machine import ROOT, environment, installed, seconds_of, this_machine
from tutorials.performance.report import percentile, table, write_json

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16  # Qwen3-0.6B's attention
SCALE = HEAD_DIM**-0.5
TINY = dict(
    zip(FIELDS.split(), ("qwen3", 64, 128, 1, 4, 2, 32, True, 300, 512))
)  # the model of --cpu
DECODE_TILES = [
    (32, 4, 3),
    (32, 4, 2),
    (32, 4, 4),
    (64, 4, 3),
    (64, 8, 3),
    (32, 2, 3),
    (16, 2, 3),
]  # keys, warps, stages
PREFILL_TILES = [
    (64, 32, 4, 3),
    (64, 32, 8, 3),
    (64, 64, 4, 3),
    (128, 64, 8, 3),
]  # rows, keys, warps, stages


class Sizes(NamedTuple):
    """How much each section does, on a GPU and with --cpu."""

    # 2: sequences -> longest context; numbers of splits, 0 is the kernel's own choice; prompts; rows, vocabulary; swaps
    decodes: dict[int, int] = {1: 4000, 8: 4000, 33: 2500, 48: 2500, 256: 600}  # noqa: RUF012
    splits: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32)
    prompts: tuple[tuple[int, int], ...] = (
        (1000, 1000),
        (17, 17),
        (513, 513),
        (2, 700),
        (64, 1500),
        (300, 301),
    )
    rows: int = 256
    vocab: int = 151_936
    swaps: int = 50
    # 3 and 4: prompts, tokens, the batch whose memory and time are measured, its contexts, steps, replayed batches
    greedy: tuple[int, int] = (32, 48)
    batch: int = 256
    context: int = 850
    steps: int = 30
    replays: tuple[int, ...] = (1, 16, 64, 128, 256)
    options: dict[str, Any] = {}  # noqa: RUF012
    # 5: sequences, their mean contexts, splits, tiles, prompts and their length
    swept: tuple[int, ...] = (16, 48, 128, 256)
    contexts: tuple[int, ...] = (850, 4096)
    swept_splits: tuple[int, ...] = (1, 2, 4, 8)
    tiles: int = 7
    prefill: tuple[int, int] = (8, 1024)


ON_GPU = Sizes()
ON_CPU = Sizes(
    {1: 60, 2: 300}, (0, 1, 2), ((20, 20), (2, 30)), 4, 1000, 2,
    (2, 4), 4, 20, 2, (1, 4), dict(kv_cache_gib=0.01, max_num_seqs=4, max_model_len=256),
    (2,), (40,), (1, 2), 1, (1, 20),
)  # fmt: skip


class Section:
    """What a section's cases give. After its deadline it skips them; one that fails spares the others."""

    def __init__(self, path: Path, deadline: float, cpu: bool, folder: Path):
        self.path, self.deadline, self.cpu, self.folder = path, deadline, cpu, folder
        self.sizes, self.device = (
            (ON_CPU, torch.device("cpu")) if cpu else (ON_GPU, torch.device("cuda"))
        )
        self.dtype = (
            torch.float16 if cpu else torch.bfloat16
        )  # the interpreter's tl.dot takes bf16 for integers
        self.results: dict[str, Any] = {"cases": {}, "skipped": []}
        self.weights_dir = Path("~/.cache/nanovllm")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def seconds_left(self) -> float:
        return self.deadline - time.time()

    def case(self, name: str, call: Callable[[], dict]) -> None:
        """Writes what the call returns. An "error" in it, or an exception, is the section's error, too."""
        if self.seconds_left() < 0:
            self.results["skipped"].append(name)
        else:
            try:
                result = call()
            except Exception as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
            self.results["cases"][name] = result
            if "error" in result:
                self.results.setdefault("error", f"{name}: {result['error']}")
        write_json(self.results, self.path)
        gc.collect()
        if not self.cpu:
            torch.cuda.empty_cache()

    def show(self, header: str, columns: list[tuple], records: dict | None = None) -> None:
        print(
            table(header, columns, self.results["cases"] if records is None else records),
            "\n",
            flush=True,
        )

    def model(self) -> str:
        """The directory of the model with random weights."""
        if not self.cpu:
            return str(random_model("qwen3-0.6b", self.weights_dir))
        if not (self.folder / "tiny").exists():
            write_checkpoint(TINY, self.folder / "tiny")
        return str(self.folder / "tiny")


def run(command: list[str], seconds: float) -> dict:
    """Status, seconds and last lines of a program, which is ended with all that it has started when its time is over."""
    start = time.perf_counter()
    options = dict(
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    with subprocess.Popen(command, cwd=ROOT, **options) as process:
        try:
            output, _ = process.communicate(timeout=max(1, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    result = {
        "status": process.returncode,
        "seconds": time.perf_counter() - start,
        "tail": output.splitlines()[-60:],
    }
    return (
        result
        if process.returncode == 0
        else result | {"error": f"exit status {process.returncode}"}
    )


# --- 1: the machine ---


def machine(section: Section) -> None:
    """Versions, the GPU, a C compiler (Triton needs one), and the two ceilings."""
    section.case("versions", versions)
    section.case("device", partial(device_facts, section))
    section.case("ceilings", lambda: this_machine(section.device, section.dtype)._asdict())
    facts = {
        name: value for case in section.results["cases"].values() for name, value in case.items()
    }
    print(*(f"{name:17} {value}" for name, value in facts.items()), "", sep="\n")


def versions() -> dict:
    packages = {
        name: installed(name) for name in ("torch", "triton", "transformers", "pytest-xdist")
    }
    compiler = next(
        filter(None, map(shutil.which, [os.environ.get("CC", "cc"), "gcc", "clang"])), None
    )
    return (
        {key: environment()[key] for key in ("commit", "python")}
        | packages
        | {"c_compiler": compiler, "processors": os.cpu_count(), "system": platform.platform()}
    )


def device_facts(section: Section) -> dict:
    if section.cpu:
        return {"name": "cpu"}
    facts = torch.cuda.get_device_properties(section.device)
    free, total = torch.cuda.mem_get_info()
    driver = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 10)["tail"]
    return {
        "name": facts.name,
        "capability": [facts.major, facts.minor],
        "multiprocessors": facts.multi_processor_count,
        "l2_bytes": facts.L2_cache_size,
        "total_bytes": total,
        "free_bytes": free,
        "cuda": torch.version.cuda,
        "driver": " ".join(driver),
    }


# --- 2: the kernels ---


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are NaN, or the largest integer: a result that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def difference(actual: torch.Tensor, expected: torch.Tensor, allowed: float = 2e-2) -> dict:
    """The largest error, NaN included, and of how large numbers. `allowed` is a share of the largest."""
    error, largest = (
        (actual.float() - expected.float()).abs().max().item(),
        expected.float().abs().max().item(),
    )
    result = {"difference": error, "of": largest}
    return result if error <= allowed * largest else result | {"error": f"it differs by {error:g}"}


def worst(*results: dict) -> dict:
    """The result with an error, or with the largest difference."""
    return max(results, key=lambda result: ("error" in result, result["difference"]))


def kernels(section: Section) -> None:
    """All Triton kernels in bf16 against PyTorch, with outputs that are NaN before, and NaN in slots that nobody owns."""
    sizes, rng = section.sizes, random.Random(0)
    for count, longest in sizes.decodes.items():
        contexts = [longest, *(rng.randint(1, longest) for _ in range(count - 1))]
        check_attention(
            section, f"{count} decodes", [(1, context) for context in contexts], sizes.splits
        )
    check_attention(section, "prefill", list(sizes.prompts), (0,))
    mixture = [(1, 1), (1, sizes.prompts[0][1]), (1, 17), *sizes.prompts]
    check_attention(section, "decodes, then chunks", mixture, sizes.splits[:3])
    section.case("add_and_norm", partial(check_norm, section))
    section.case("norm_and_rotate", partial(check_rotation, section))
    section.case("silu_and_mul", partial(check_silu, section))
    section.case("sample", partial(check_sample, section))
    section.case(f"{sizes.swaps} swaps", partial(check_swaps, section))
    section.show("kernel|largest error|of numbers up to", [("difference", ".1e"), ("of", ",.1f")])


def check_attention(
    section: Section, name: str, sequences: list[tuple[int, int]], all_splits: tuple[int, ...]
) -> None:
    """Keys and values are stored, and read by kernels with several numbers of splits."""
    from nanovllm.layers import triton_attention

    num_blocks = sum(-(-context // BLOCK_SIZE) for _, context in sequences) + 8
    batch, keys = random_batch(sequences, KV_HEADS, HEAD_DIM, BLOCK_SIZE, num_blocks, num_layers=1)
    for field, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            setattr(
                batch,
                field,
                value.to(section.device, section.dtype if value.is_floating_point() else None),
            )
    new = torch.cat([kv[:, 0, -length:] for kv, (length, _) in zip(keys, sequences)], dim=1).to(
        section.device, section.dtype
    )
    expected_cache = batch.kv_cache.clone()
    torch_ops.store_kv(*new, replace(batch, kv_cache=expected_cache), 0)

    def stored() -> dict:
        views = torch.cat([new[0], new[1]], dim=1).split(KV_HEADS, dim=1)  # as in the model
        triton_attention.store_kv(*views, batch, 0)
        return difference(batch.kv_cache.nan_to_num(99), expected_cache.nan_to_num(99), 0)

    def attended(splits: int) -> dict:
        with poisoned():
            out = triton_attention.paged_attention(q, batch, 0, SCALE, splits)
        return difference(out, expected)

    section.case(f"{name}: store_kv", stored)
    q = torch.randn(
        sum(length for length, _ in sequences), HEADS, HEAD_DIM, device=section.device
    ).to(section.dtype)
    expected = attention.paged_attention(q, replace(batch, kv_cache=expected_cache), 0, SCALE)
    for splits in all_splits:
        section.case(f"{name}: {splits or 'default'} splits", partial(attended, splits))


def randn(section: Section, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=section.device).to(section.dtype)


def norm(section: Section, size: int) -> torch.nn.RMSNorm:
    layer = torch.nn.RMSNorm(size, 1e-6).to(section.device, section.dtype).requires_grad_(False)
    layer.weight.data.add_(0.2 * randn(section, size))
    return layer


def check_norm(section: Section) -> dict:
    from nanovllm.layers import triton_ops

    x, residual, layer = (
        randn(section, section.sizes.rows, 1024),
        randn(section, section.sizes.rows, 1024),
        norm(section, 1024),
    )
    residuals = residual.clone(), residual.clone()
    expected = torch_ops.add_and_norm(x, residuals[0], layer)
    with poisoned():
        out = triton_ops.add_and_norm(x, residuals[1], layer)
    return worst(difference(out, expected), difference(residuals[1], residuals[0]))


def check_rotation(section: Section) -> dict:
    from nanovllm.layers import triton_ops

    sizes, angles = (
        [HEADS, KV_HEADS, KV_HEADS],
        torch.randn(section.sizes.rows, HEAD_DIM // 2, device=section.device),
    )
    qkv, norms = (
        randn(section, section.sizes.rows, sum(sizes), HEAD_DIM),
        [norm(section, HEAD_DIM) for _ in range(2)],
    )
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    expected = torch_ops.norm_and_rotate(qkv.clone(), *norms, cos_sin, sizes)
    return worst(
        *map(difference, triton_ops.norm_and_rotate(qkv, *norms, cos_sin, sizes), expected)
    )


def check_silu(section: Section) -> dict:
    from nanovllm.layers import triton_ops

    x = randn(section, section.sizes.rows, 2 * 3072)
    with poisoned():
        out = triton_ops.silu_and_mul(x)
    return difference(out, torch_ops.silu_and_mul(x))


def check_sample(section: Section) -> dict:
    """Sums in another order may move a token to its neighbor, very rarely, and never a greedy one. The difference is the
    share of such rows."""
    from nanovllm.layers import triton_ops

    rows, device = section.sizes.rows, section.device
    logits, numbers = (
        4 * randn(section, rows, section.sizes.vocab),
        torch.arange(rows, device=device),
    )
    sampling = Sampling((numbers % 4) * 0.5, seed=numbers * 3**30, position=numbers + 100)
    with poisoned():
        tokens = triton_ops.sample(logits, sampling)
    unequal = tokens != torch_ops.sample(logits, sampling)
    share = unequal.float().mean().item()
    result = {"difference": share, "of": 1}
    return (
        result | {"error": f"{share:.1%} of the tokens differ"}
        if share > 0.02 or unequal[::4].any()
        else result
    )


def check_swaps(section: Section) -> dict:
    """Blocks go out, are overwritten at once, and come back elsewhere. The difference is the share that came back wrong."""
    rng, wrong = random.Random(0), 0
    cache = randn(section, 2, 28, 64, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    host = HostCache(cache, 50)
    for _ in range(section.sizes.swaps):
        blocks, places, host_ids = (rng.sample(range(n), 48) for n in (64, 64, 50))
        expected = cache[:, :, blocks]
        host.swap_out(dict(zip(blocks, host_ids)))
        cache[:, :, blocks] = torch.nan
        host.swap_in(dict(zip(host_ids, places)))
        wrong += not torch.equal(cache[:, :, places], expected)
        cache.normal_()
    result = {"difference": wrong / section.sizes.swaps, "of": 1}
    return result | {"error": f"{wrong} came back wrong"} if wrong else result


# --- 3: the engine ---


def timed(call: Callable, seconds: list[float]) -> Callable:
    """The function, which also notes how long each call takes."""

    def noted(*args, **kwargs):
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return noted


def watch(owner: Any, name: str, seconds: list[float]):
    """A patch that notes how long each call takes."""
    return mock.patch.object(owner, name, timed(getattr(owner, name), seconds))


def noting_terms(call: Callable, terms: dict[str, int]) -> Callable:
    """num_blocks_that_fit, which also notes each term of its sum and of memory_left's."""
    codes = [function.__code__ for function in (memory.num_blocks_that_fit, memory.memory_left)]

    def at_return(frame, event, arg):
        if event == "return" and frame.f_code in codes:
            terms.update(
                (name, value) for name, value in frame.f_locals.items() if type(value) is int
            )

    def noted(*args):
        sys.setprofile(at_return)
        try:
            return call(*args)
        finally:
            sys.setprofile(None)

    return noted


def new_llm(section: Section, **options) -> tuple[LLM, dict]:
    """An engine, and what its start took: seconds, and each term of the memory left for the cache, in bytes."""
    log: dict[str, list[float]] = {"load_model": [], "warm_up": [], "record": []}
    terms: dict[str, int] = {}
    path, fit, start = section.model(), model_runner.num_blocks_that_fit, time.perf_counter()
    with ExitStack() as patches:
        for name, seconds in log.items():
            patches.enter_context(
                watch(DecodeGraphs if name == "record" else model_runner, name, seconds)
            )
        patches.enter_context(
            mock.patch.object(model_runner, "num_blocks_that_fit", noting_terms(fit, terms))
        )
        llm = LLM(path, **(section.sizes.options | options))
    facts = {"start_seconds": time.perf_counter() - start, "recorded": len(log["record"])}
    facts |= {f"{name}_seconds": sum(seconds) for name, seconds in log.items()}
    return llm, facts | {"terms": terms, "kv_bytes": llm.runner.kv_cache.nbytes}


def random_prompts(llm: LLM, count: int, longest: int) -> list[list[int]]:
    """The longest prompt is three times as long as the shortest."""
    rng, vocab = random.Random(0), llm.runner.vocab_size
    return [
        [rng.randrange(vocab) for _ in range(rng.randint(longest // 3 + 1, longest))]
        for _ in range(count)
    ]


def engine(section: Section) -> None:
    """Greedy tokens of all backends in fp32; logits in bf16; the terms of the memory, and how much of it is used."""
    answers: dict[str, list] = {}
    logits: dict[str, list[torch.Tensor]] = {}
    for dtype in ("float32", section.dtype_name):
        for name, options in {
            "torch": {"attention_backend": "torch"},
            "eager": {"attention_backend": "triton", "enforce_eager": True},
            "graphs": {"attention_backend": "triton"},
        }.items():
            asked = partial(
                ask, section, options | {"dtype": dtype}, f"{dtype} {name}", answers, logits
            )
            section.case(f"{dtype} {name}", asked)
    section.case("top-p", partial(check_memory, section))
    columns = [
        (f"{name}_seconds", ",.2f")
        for name in ("start", "load_model", "warm_up", "record", "generate")
    ]
    columns += [("same", ""), ("difference", ".1e")]
    section.show("engine|start s|load|warm up|record|generate|same tokens|logits", columns)
    facts = section.results["cases"].get("top-p", {})
    gib = {name: {"gib": value / 2**30} for name, value in facts.items() if name.endswith("_bytes")}
    gib |= {
        name: {"gib": value / 2**30}
        for name, value in facts.get("terms", {}).items()
        if name != "num_blocks"
    }
    section.show("memory|GiB", [("gib", ",.3f")], gib)


def ask(section: Section, options: dict, name: str, answers: dict, logits: dict) -> dict:
    """In fp32 the tokens are compared with PyTorch's; in bf16 the logits of two steps, as long as the tokens agree."""
    llm, facts = new_llm(section, **options)
    seen = logits[name] = []
    llm.runner.model.lm_head.register_forward_hook(
        lambda module, args, out: seen.append(out[:64].float().cpu())
    )
    count, length = section.sizes.greedy
    is_exact, reference = options["dtype"] == "float32", f"{options['dtype']} torch"
    params = SamplingParams(
        temperature=0, max_tokens=length if is_exact else 2, ignore_eos=True, logprobs=2
    )
    start = time.perf_counter()
    outputs = [
        o.outputs[0]
        for o in llm.generate(random_prompts(llm, count, 4 * length), params, use_tqdm=False)
    ]
    facts["generate_seconds"] = time.perf_counter() - start
    answers[name] = [output.token_ids for output in outputs]
    if name == reference or reference not in answers:
        return facts
    pairs = list(zip(answers[name], answers[reference]))
    facts["same"] = f"{sum(one == other for one, other in pairs)} of {len(pairs)}"
    if not is_exact:
        (first, second), (expected, then) = seen, logits[reference]
        alike = [i for i, (one, other) in enumerate(pairs) if one[0] == other[0]]
        return facts | worst(
            difference(first, expected, 0.1), difference(second[alike], then[alike], 0.1)
        )
    unequal = [i for i, (one, other) in enumerate(pairs) if one != other]
    facts["unequal"] = [
        unequal_at(outputs[i], answers[reference][i]) | {"prompt": i} for i in unequal
    ]
    is_tie = all(case["gap"] < 1e-4 for case in facts["unequal"])
    return facts if is_tie else facts | {"error": f"{len(unequal)} prompts have other tokens"}


def unequal_at(output, expected: list[int]) -> dict:
    """Where the tokens part, and how far apart the two likeliest were: rounding decides about a tie."""
    at = next(i for i, (one, other) in enumerate(zip(output.token_ids, expected)) if one != other)
    likeliest = sorted(output.logprobs[at].values())[-2:]
    return {"position": at, "gap": likeliest[-1] - likeliest[0]}


def memory_used(section: Section) -> int:
    """Bytes that are taken on the GPU, by whomever; 0 with --cpu."""
    if section.cpu:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_memory(section: Section) -> dict:
    """A batch that sorts all its logits, which is what takes the most memory."""
    llm, facts = new_llm(section, dtype=section.dtype_name, attention_backend="triton")
    facts["used_at_start_bytes"] = memory_used(section)
    params = SamplingParams(top_p=0.9, max_tokens=8, ignore_eos=True)
    llm.generate(random_prompts(llm, section.sizes.batch, 32), params, use_tqdm=False)
    facts["used_bytes"] = memory_used(section)
    facts["granted_bytes"] = int(facts["terms"].get("total", 0) * llm.config.gpu_memory_utilization)
    over = facts["used_bytes"] - facts["granted_bytes"]
    return facts if over <= 0 else facts | {"error": f"{over / 2**30:.2f} GiB more than granted"}


# --- 4: where the time goes ---


def decode_step(section: Section) -> None:
    """A decode step of 256: kernels, replays of graphs, wall and GPU time, and the phases of the host."""
    sizes = section.sizes
    llm, _ = new_llm(
        section,
        dtype=section.dtype_name,
        attention_backend="triton",
        **({"max_model_len": 4096} | sizes.options),
    )
    params = SamplingParams(temperature=0.6, max_tokens=5 * sizes.steps + 10, ignore_eos=True)
    for prompt in random_prompts(
        llm, sizes.batch, sizes.context * 3 // 2
    ):  # their mean is the context
        llm.add_request(prompt, params)
    sequences = [request.sequences[0] for request in llm.requests.values()]
    step = partial(llm.step, report=False)
    while any(seq.num_missing_tokens > 1 for seq in sequences):
        step()
    section.case("wall", partial(wall_time, step, sizes.steps))
    section.case("phases", partial(phases, llm, step, sizes.steps))
    section.case("kernels", partial(profiled, section, step))
    section.case("replays", partial(replays, section, llm))
    section.case(
        "batch",
        lambda: {"sequences": len(llm.requests), "contexts": [len(seq) for seq in sequences]},
    )
    cases = section.results["cases"]
    section.show("phase of the host|ms", [("ms", ",.3f")], rows_of(cases, "phases", "ms"))
    section.show("graph of|ms", [("ms", ",.3f")], rows_of(cases, "replays", "ms"))
    rows = cases.get("kernels", {}).get("kernels", [])
    section.show(
        "kernel|us per step|calls",
        [("us", ",.1f"), ("calls", ",.1f")],
        {row["name"][:60]: row for row in rows},
    )
    wall, busy = cases.get("wall", {}).get("ms_p50"), cases.get("kernels", {}).get("busy_ms")
    if wall and busy:
        print(
            f"a step: wall {wall:.3f} ms, the device works {busy:.3f} ms and is idle {max(0, wall - busy):.3f} ms"
        )


def rows_of(cases: dict, name: str, column: str) -> dict:
    return {str(key): {column: value} for key, value in cases.get(name, {}).items()}


def wall_time(step: Callable, count: int) -> dict:
    seconds: list[float] = []
    for _ in range(count):
        timed(step, seconds)()
    return {f"ms_p{q}": 1000 * (percentile(seconds, q) or 0) for q in (10, 50, 90)}


def phases(llm: LLM, step: Callable, count: int) -> dict:
    """Median milliseconds per step of each. `run` has those from `_prepare` to `sample` in it, and the wait for tokens."""
    runner, scheduler, log = llm.runner, llm.scheduler, {}
    with ExitStack() as patches:
        for owner, name in (
            (scheduler, "schedule"), (nanovllm.engine, "check_schedule"), (runner, "run"), (runner, "_prepare"),
            (runner, "_sampling"), (runner.graphs, "run"), (runner.graphs, "padded"), (StepInputs, "to"),
            (runner.ops, "sample"), (scheduler, "update"), (llm, "_deliver"),
        ):  # fmt: skip
            label = "graphs.run" if owner is runner.graphs and name == "run" else name
            patches.enter_context(watch(owner, name, log.setdefault(label, [])))
        for _ in range(count):
            step()
    return {name: 1000 * (percentile(seconds, 50) or 0) for name, seconds in log.items()}


def profiled(section: Section, step: Callable) -> dict:
    """Time per step of the 12 longest kernels, and of all."""
    count = min(10, section.sizes.steps)
    kind = DeviceType.CPU if section.cpu else DeviceType.CUDA
    activities = (
        [ProfilerActivity.CPU] if section.cpu else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    )
    with profile(activities=activities) as profiler:
        for _ in range(count):
            step()
    events = [
        e
        for e in profiler.key_averages()
        if e.device_type == kind and not getattr(e, "is_user_annotation", False)
    ]
    us = {
        e.key: (e.self_cpu_time_total if section.cpu else e.self_device_time_total) / count
        for e in events
    }
    rows = [{"name": e.key, "us": us[e.key], "calls": e.count / count} for e in events]
    return {
        "busy_ms": sum(us.values()) / 1000,
        "kernels": sorted(rows, key=lambda row: -row["us"])[:12],
    }


def replays(section: Section, llm: LLM) -> dict:
    """Milliseconds of a graph by the device's clock, with the first sequences of a real step."""
    runner, milliseconds = llm.runner, {}
    real = runner.run

    @torch.inference_mode()
    def replay_and_run(schedule: Schedule):
        for size in section.sizes.replays:
            if len(schedule.items) >= size:
                runner.graphs.run(runner._prepare(Schedule(schedule.items[:size])), size)
                times = [
                    seconds_of(runner.graphs.replays[size], section.device)
                    for _ in range(section.sizes.steps)
                ]
                milliseconds[size] = 1000 * percentile(times, 50)
        return real(schedule)

    with mock.patch.object(runner, "run", replay_and_run):
        llm.step(report=False)
    return milliseconds


# --- 5: the sweep of tiles ---


class Swept(NamedTuple):
    """Sequences with the same number of queries each, over so many layers that no cache holds their keys."""

    batch: Batch
    q: torch.Tensor
    layers: int
    kv_bytes: int  # per layer


def swept(section: Section, contexts: list[int], queries: int) -> Swept:
    counts, device = (
        torch.tensor([-(-context // BLOCK_SIZE) for context in contexts]),
        section.device,
    )
    kv_bytes = 2 * sum(contexts) * KV_HEADS * HEAD_DIM * section.dtype.itemsize
    layers = 1 if section.cpu else max(1, min(8, 2**29 // kv_bytes))
    num_blocks = int(counts.sum())
    cache = torch.empty(
        2, layers, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=section.dtype, device=device
    ).normal_()
    batch = Batch(
        kv_cache=cache,
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # nothing is stored
        cu_seqlens_q=torch.arange(
            0, (len(contexts) + 1) * queries, queries, dtype=torch.int32, device=device
        ),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        cu_blocks=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device),
        block_tables=torch.randperm(num_blocks, device=device).int(),
        num_decodes=len(contexts) if queries == 1 else 0,
        max_context=max(contexts),
    )
    return Swept(batch, randn(section, len(contexts) * queries, HEADS, HEAD_DIM), layers, kv_bytes)


def tile_time(
    section: Section, case: Swept, tile: tuple, splits: int, expected: torch.Tensor
) -> dict:
    """Of a tile (tokens, rows, keys, warps, stages), or with None of the kernel's own. What cannot be launched has none."""
    from nanovllm.layers import triton_attention

    sizes = (lambda *_: tile) if tile else triton_attention.tile_sizes
    call = partial(triton_attention.paged_attention, case.q, case.batch, scale=SCALE, splits=splits)
    with mock.patch.object(triton_attention, "tile_sizes", sizes), torch.inference_mode():
        checked = difference(call(layer=0), expected)
        return checked | {"us": 1e6 * seconds_per_layer(call, case.layers, section.device)}


def all_times(section: Section, case: Swept, tiles: list, rate: float, work: float) -> dict:
    """Of all (tile, splits), best first; `share` of the rate at which the work could be done."""
    expected = attention.paged_attention(case.q, case.batch, 0, SCALE)
    rows = []
    for tile, splits in tiles:
        if section.seconds_left() < 0:
            break
        row = {"tile": " ".join(map(str, tile[1:] if tile else ["default"])), "splits": splits}
        try:
            row |= tile_time(section, case, tile, splits, expected)
            row["share"] = work / rate / row["us"] * 1e6
        except Exception as error:  # more registers or shared memory than there are, for example
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    result: dict = {
        "rows": sorted(rows, key=lambda row: row.get("us", float("inf"))),
        "left_out": len(tiles) - len(rows),
    }
    wrong = [row for row in rows if "error" in row or "failed" in row]
    return result | {"error": f"{len(wrong)} tiles failed: {wrong[0]}"} if wrong else result


def tiles_of(section: Section) -> tuple[list, list]:
    """(decode, prefill), each a list of (tile, splits); the kernel's own choice is first."""
    group = HEADS // KV_HEADS
    decode = [
        ((1, 16, *tile), n)
        for tile in DECODE_TILES[: section.sizes.tiles]
        for n in section.sizes.swept_splits
    ]
    prefill = [
        ((rows // group, rows, *tile), 1) for rows, *tile in PREFILL_TILES[: section.sizes.tiles]
    ]
    return [(None, 0), *decode], [(None, 1), *prefill]


def compile_tile(
    path: Path, deadline: float, cpu: bool, folder: Path, tile: tuple, splits: int, queries: int
) -> None:
    """In another process: leaves the kernel in Triton's cache on disk."""
    section = Section(path, deadline, cpu, folder)
    case = swept(section, [64, 32], queries)
    with suppress(Exception):  # it is reported by who measures it
        tile_time(section, case, tile, splits, torch.zeros_like(case.q))


def compile_tiles(section: Section, decode: list, prefill: list) -> dict:
    jobs = [(*tile, 1) for tile in decode] + [(*tile, 8) for tile in prefill]
    start, settings = (
        time.perf_counter(),
        (section.path, section.deadline, section.cpu, section.folder),
    )
    with ProcessPoolExecutor(1 if section.cpu else 8, get_context("spawn")) as pool:
        futures = [pool.submit(compile_tile, *settings, *job) for job in jobs]
        for future in futures:
            future.result()
    return {"seconds": time.perf_counter() - start, "kernels": len(jobs)}


def sweep(section: Section) -> None:
    """Tiles and splits of decodes, with the share of the bandwidth of a copy, and tiles of prompts, of a product's rate."""
    sizes, rng = section.sizes, random.Random(0)
    decode, prefill = tiles_of(section)
    section.case("compile", partial(compile_tiles, section, decode, prefill))
    hardware = this_machine(section.device, section.dtype)
    columns = [("splits", ""), ("us", ",.1f"), ("share", ".0%"), ("difference", ".0e")]
    cases: dict[str, tuple] = {
        "prompts": ([sizes.prefill[1]] * sizes.prefill[0], sizes.prefill[1], prefill)
    }
    for count, mean in [(count, mean) for mean in sizes.contexts for count in sizes.swept]:
        contexts = [rng.randint(mean // 2, mean * 3 // 2) for _ in range(count)]
        cases[f"{count} x {mean}"] = (contexts, 1, decode)
    for name, (contexts, queries, tiles) in cases.items():
        section.case(name, partial(swept_case, section, contexts, queries, tiles, hardware))
        rows = section.results["cases"].get(name, {}).get("rows", [])
        section.show(
            f"{name}|splits|us|share|error",
            columns,
            {f"{i}: {row['tile']}": row for i, row in enumerate(rows[:5], 1)},
        )


def swept_case(section: Section, contexts: list[int], queries: int, tiles: list, hardware) -> dict:
    case = swept(section, contexts, queries)
    if queries == 1:
        return all_times(section, case, tiles, hardware.bytes_per_second, case.kv_bytes)
    flops = 4 * HEADS * HEAD_DIM * sum(visible_keys(queries, context) for context in contexts)
    return all_times(section, case, tiles, hardware.flops_per_second, flops)


# --- 6 and 7: programs ---


def benchmark(section: Section) -> None:
    """bench.py, on the whole workload of nano-vllm, with a short and with a long longest context."""
    for longest in (256, 512) if section.cpu else (4096, 40960):
        section.case(f"max_model_len {longest}", partial(bench, section, longest))
        print(
            *section.results["cases"].get(f"max_model_len {longest}", {}).get("tail", []),
            "",
            sep="\n",
            flush=True,
        )


def bench(section: Section, longest: int) -> dict:
    work = ["--random-weights", "qwen3-0.6b", "--workload", "nano-vllm"]
    if section.cpu:
        work = ["--model", section.model(), "--requests", "4", "--tokens", "4", "8"]
    file = section.folder / "bench.json"
    options = ["--repeat", "1", "--max-model-len", str(longest), "--json", str(file)]
    result = run([sys.executable, "bench.py", *work, *options], section.seconds_left())
    return result | {"report": json.loads(file.read_text())} if result["status"] == 0 else result


def tests(section: Section) -> None:
    """The tests that use a GPU: first the one that wants it for itself, then all others, in parallel if that is possible."""
    if section.cpu:
        section.case(
            "one test",
            lambda: pytest("tests/test_fused.py", "-k", "silu", seconds=section.seconds_left()),
        )
    else:
        alone, files = (
            "memory_stays",
            [f"tests/test_{name}.py" for name in ("kernels", "fused", "cuda_graphs", "sampler")],
        )
        parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
        others = [
            "tests/test_gpu.py",
            *files,
            "-k",
            f"not {alone} and not ahead_of_time",
            *parallel,
        ]
        section.case(
            "alone",
            lambda: pytest("-m", "gpu", "tests", "-k", alone, seconds=section.seconds_left()),
        )
        section.case("others", lambda: pytest(*others, seconds=section.seconds_left()))
    for case in section.results["cases"].values():
        print(*case["tail"][-25:], sep="\n", flush=True)


def pytest(*arguments: str, seconds: float) -> dict:
    return run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments], seconds)


# --- all of them ---

SECTIONS = {  # seconds of 8 minutes; the last one has what is left
    machine: 20, kernels: 70, engine: 100, decode_step: 50, sweep: 100, benchmark: 90, tests: 50,
}  # fmt: skip


def run_section(number: int, path: Path, deadline: float, cpu: bool) -> None:
    """In a process of its own."""
    start = time.perf_counter()
    gc.freeze()  # each recording of a graph collects garbage, and need not look at what was imported
    with tempfile.TemporaryDirectory() as folder:
        section = Section(path, deadline, cpu, Path(folder))
        try:
            list(SECTIONS)[number - 1](section)
        except Exception as error:
            traceback.print_exc()
            section.results["error"] = f"{type(error).__name__}: {error}"
        section.results["seconds"] = time.perf_counter() - start
        write_json(section.results, path)
    gc.unfreeze()  # or Triton's bindings complain at the end


def run_apart(number: int, path: Path, deadline: float, cpu: bool) -> dict:
    """Starts the section, and ends it if it has not noticed that its time is over. Returns its results."""
    path.unlink(missing_ok=True)
    process = get_context("spawn").Process(target=run_section, args=(number, path, deadline, cpu))
    process.start()
    process.join(deadline - time.time() + 30)
    if process.is_alive():
        process.kill()
        process.join()
    results = json.loads(path.read_text()) if path.exists() else {}
    if process.exitcode != 0:
        results["error"] = (
            f"its process ended with {process.exitcode}"
            + "; " * ("error" in results)
            + results.get("error", "")
        )
        write_json(results, path)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = range(1, len(SECTIONS) + 1)
    parser.add_argument(
        "--sections", default=",".join(map(str, numbers)), help="default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("first_contact"), help="folder for the results"
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--cpu", action="store_true", help="without a GPU, in Triton's interpreter, tiny"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.cpu:
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    end, errors = time.time() + 60 * args.minutes, 0
    for number in map(int, args.sections.split(",")):
        function, share = list(SECTIONS.items())[number - 1]
        print(f"=== {number}: {function.__doc__}\n", flush=True)
        deadline = (
            end if number == numbers[-1] else min(end, time.time() + share * args.minutes / 8)
        )
        results = run_apart(
            number, (args.out / f"{number}_{function.__name__}.json").absolute(), deadline, args.cpu
        )
        errors += "error" in results
        print(
            f"--- {results.get('seconds', 0):.0f} s, {len(results.get('skipped', []))} cases skipped"
        )
        print(
            f"--- ERROR: {results['error']}\n" if "error" in results else "--- no errors\n",
            flush=True,
        )
    sys.exit(errors)


if __name__ == "__main__":
    main()
