"""A decode step with paging in software (torch) and by mapping memory (vattention), part by part.

    python -m tutorials.performance.vattention --json tutorials/results/cpu_vattention.json

All engines have the same weights, take turns step by step, and decode the same sequences, whose
blocks lie in no order. Prints milliseconds per step, and what mapping took. Qwen3-0.6B has random
weights; in float32 it takes 18 GB of memory; all takes two minutes.
"""

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from nanovllm.config import EMBEDDED_MODEL, TOKENS_PER_STEP, Config
from nanovllm.layers import torch_ops
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import find_model, load_config
from nanovllm.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request, Sequence
from nanovllm.vattention import ops as vattention
from nanovllm.vattention.cache import PageTable, VirtualCache
from tutorials.arguments import experiment
from tutorials.machine import device_name, environment, installed
from tutorials.performance.checkpoints import random_model
from tutorials.report import aligned, percentile, write_json

CASES = {  # sequences, the shortest context, the longest
    "tiny-qwen3": [
        *[(1, 128, 128), (1, 1000, 1000), (8, 250, 250), (8, 2000, 2000)],
        *[(64, 128, 128), (64, 1000, 1000), (64, 100, 1900)],
    ],
    "qwen3-0.6b": [
        *[(1, 250, 250), (1, 1000, 1000), (1, 4000, 4000), (4, 4000, 4000)],
        *[(16, 1000, 1000), (16, 200, 1800), (64, 250, 250), (64, 50, 450)],
    ],
}
ENGINES = {  # attention_backend, block_size
    "tiny-qwen3": [("torch", 16), ("vattention", 16), ("torch", 128), ("vattention", 128)],
    "qwen3-0.6b": [("torch", 16), ("vattention", 16), ("vattention", 256)],
}
STEPS = 16
WARM_UP = 2
FUNCTIONS = {  # part of a step -> where it happens
    "attention": [(torch_ops, "paged_attention"), (vattention, "paged_attention")],
    "gather": [(torch.Tensor, "index_select")],
    "layout": [(torch_ops, "layout"), (vattention, "layout")],
    "rows": [(VirtualCache, "show")],
    "mapping": [(PageTable, "change")],
}


class Clock:
    """Seconds and calls of functions, while they are replaced."""

    def __init__(self):
        self.seconds = dict.fromkeys(FUNCTIONS, 0.0)
        self.calls = dict.fromkeys(FUNCTIONS, 0)

    def timed(self, part: str, function):
        def call(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begin
                self.calls[part] += 1

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        plain = []
        for part, places in FUNCTIONS.items():
            for owner, name in places:
                plain.append((owner, name, getattr(owner, name)))
                setattr(owner, name, self.timed(part, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in plain:
                setattr(owner, name, function)


class SameWeights(ModelRunner):
    """A runner that has the weights of another one."""

    def __init__(self, other: ModelRunner | None, *args):
        self.other = other
        super().__init__(*args)

    def load(self, path: Path, hf_config, **options):
        if self.other is None:
            return super().load(path, hf_config, **options)
        model = self.other.model
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        return copy.deepcopy(model, shared | {id(self.other.ops): self.ops})


class Decodes:
    """Sequences that have so many tokens in the cache of a runner, and blocks for some more."""

    def __init__(self, runner: ModelRunner, contexts: list[int]):
        self.runner = runner
        order = list(range(runner.num_blocks))
        random.Random(0).shuffle(order)
        self.seqs: list[Sequence] = []
        self.tables: list[list[int]] = []
        for i, context in enumerate(contexts):
            params = SamplingParams(temperature=0)
            self.seqs += Request(str(i), None, [i] * context, params).sequences
            num_blocks = self.num_blocks_for(context + WARM_UP + STEPS)
            self.tables.append([order.pop() for _ in range(num_blocks)])

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.runner.shape.block_size)

    def memory(self) -> tuple[int, int]:
        """Bytes that the sequences hold, and that their tokens need."""
        shape = self.runner.shape
        plain = getattr(shape, "shape", shape)  # without padding
        held = sum(self.num_blocks_for(len(seq)) for seq in self.seqs) * shape.block_bytes
        return held, sum(map(len, self.seqs)) * plain.block_bytes // plain.block_size

    def step(self) -> tuple[float, Clock]:
        schedule = Schedule()
        for seq, table in zip(self.seqs, self.tables):
            seq.block_table = table[: self.num_blocks_for(len(seq))]
            schedule.add(Item(seq, len(seq) - 1, 1))
        clock = Clock()
        with clock.running():
            begin = time.perf_counter()
            self.runner.run(schedule)
            seconds = time.perf_counter() - begin
        for seq in self.seqs:
            seq.token_ids.append(0)
        return seconds, clock


def new_runners(name: str, path: Path, dtype: str) -> list[ModelRunner]:
    num_seqs = max(seqs for seqs, _, _ in CASES[name])
    longest = max(longest for _, _, longest in CASES[name]) + WARM_UP + STEPS
    # a block more for each sequence
    most = max(
        seqs * ((low + high) // 2 + WARM_UP + STEPS + 256) for seqs, low, high in CASES[name]
    )
    runners: list[ModelRunner] = []
    for backend, block_size in ENGINES[name]:
        config = Config(
            model=str(path),
            device="cpu",
            attention_backend=backend,
            block_size=block_size,
            dtype=dtype,
            num_blocks=most // block_size,
            max_num_seqs=num_seqs,
            max_model_len=-(-longest // 256) * 256 if longest > 2048 else None,
        )
        hf_config = load_config(path)
        limits = config.resolved(longest_context(hf_config), TOKENS_PER_STEP["cpu"])
        other = runners[0] if runners else None
        arguments = (config, limits, hf_config, path, torch.device("cpu"))
        runners.append(SameWeights(other, *arguments))
    return runners


def contexts_of(num_seqs: int, shortest: int, longest: int) -> list[int]:
    """At equal distances, in no order."""
    between = max(1, num_seqs - 1)
    contexts = [shortest + i * (longest - shortest) // between for i in range(num_seqs)]
    random.Random(1).shuffle(contexts)
    return contexts


def measure_case(runners: list[ModelRunner], names: list[str], contexts: list[int]) -> dict:
    decodes = [Decodes(runner, contexts) for runner in runners]
    steps: list[list[tuple[float, Clock]]] = [[] for _ in runners]
    for i in range(WARM_UP + STEPS):
        for some, results in zip(decodes, steps):
            result = some.step()
            if i >= WARM_UP:
                results.append(result)
    report = {}
    for name, results, some in zip(names, steps, decodes):
        report[name] = {"total": percentile([seconds for seconds, _ in results], 50)}
        report[name]["bytes_held"], report[name]["bytes_used"] = some.memory()
        for part in FUNCTIONS:
            values = [clock.seconds[part] for _, clock in results]
            # most steps map nothing: there the mean says what a step pays
            is_rare = part == "mapping"
            report[name][part] = sum(values) / STEPS if is_rare else percentile(values, 50)
        new_blocks = sum(clock.calls["mapping"] for _, clock in results)
        seconds = sum(clock.seconds["mapping"] for _, clock in results)
        report[name]["per_new_block"] = seconds / new_blocks if new_blocks else None
    return report


def engine_names(name: str) -> list[str]:
    return [f"{backend} {block_size}" for backend, block_size in ENGINES[name]]


def measure(args) -> dict:
    report = environment() | {"device": device_name(torch.device("cpu"))}
    report["versions"] = {"torch": installed("torch")}
    report |= {"vattention": {}, "shapes": {}}
    for name in args.models:
        is_embedded = name == "tiny-qwen3"
        path = Path(EMBEDDED_MODEL) if is_embedded else random_model(name, args.weights_dir)
        runners = new_runners(name, find_model(str(path)), args.dtype)
        names = engine_names(name)
        report["shapes"][name] = {
            one: {
                "num_pieces": getattr(runner.shape, "pieces", (None,))[0],
                "block_bytes": runner.shape.block_bytes,
                "dtype": str(runner.dtype).removeprefix("torch."),
            }
            for one, runner in zip(names, runners)
        }
        rows = []
        for num_seqs, shortest, longest in CASES[name]:
            case = measure_case(runners, names, contexts_of(num_seqs, shortest, longest))
            context = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
            rows.append({"sequences": num_seqs, "context": context, "engines": case})
        report["vattention"][name] = rows
    print(f"milliseconds per step\n\n{aligned(rows_of_cases(report['vattention']))}")
    return report


def rows_of_cases(all_cases: dict[str, list[dict]]) -> list[list[str]]:
    """The parts of decode steps, and their memory."""
    header = "sequences of tokens|engine, tokens per block|step|attention"
    rows = [f"{header}|of it gather|mapping|µs per new block|empty memory".split("|")]
    for model, cases in all_cases.items():
        for case in cases:
            name = f"{case['sequences']} of {case['context']}"
            if model == "tiny-qwen3":
                name = f"embedded model: {name}"
            for engine, parts in case["engines"].items():
                times = [1e3 * parts[kind] for kind in ("total", "attention", "gather", "mapping")]
                cells = [f"{ms:,.{0 if ms >= 100 else 1 if ms >= 10 else 2}f}" for ms in times]
                each = parts["per_new_block"]
                cells.append("" if each is None else f"{1e6 * each:,.0f}")
                cells.append(f"{1 - parts['bytes_used'] / parts['bytes_held']:.0%}")
                rows.append([name, engine, *cells])
    return rows


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--models", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--weights-dir", type=Path, default=Path("~/.cache/nanovllm-bench"))
    args = parser.parse_args()
    report = measure(args)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
