"""Which tiles, splits and parts of attention are fastest, and which tile of the sampler."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from nanovllm.layers import attention
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.simulator.cost_model import Hardware, visible_keys
from tutorials.machine import seconds_of, this_machine
from tutorials.measure.first_contact.decode_step import sampled_rows, seconds_behind_a_pause
from tutorials.measure.first_contact.section import Section, milliseconds, run, show
from tutorials.report import percentile

HEADS = 16  # this and the next three: Qwen3-0.6B's attention
KV_HEADS = 8
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
BLOCK_SIZE = 16
ALLOWED = 2e-2  # error of a result, as a share of its largest number
COMPILE_SECONDS = 25
Tile = tuple[int, ...]  # tokens, rows, keys, warps, stages


class Choice(NamedTuple):
    """How attention is launched; what is None or 0 is chosen by the engine."""

    tile: Tile | None = None
    splits: int = 0
    part: int = 0  # tokens of a context that are worth a program


DECODE_TILES = [  # keys, warps, stages
    (32, 4, 3),
    (32, 4, 2),
    (32, 4, 4),
    (64, 4, 3),
    (64, 8, 3),
    (64, 4, 2),
    (32, 2, 3),
    (16, 2, 3),
]
PREFILL_TILES = [  # rows, keys, warps, stages
    (64, 32, 4, 3),
    (64, 32, 8, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 32, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
]
SAMPLER_TILES = [(2048, 8), (4096, 4), (4096, 8), (8192, 8)]  # tokens, warps


class Load(NamedTuple):
    """Sequences with equally many queries, over so many layers that no cache holds their keys."""

    batch: Batch
    q: torch.Tensor
    layers: int
    kv_bytes: int  # per layer


def new_load(section: Section, contexts: list[int], queries: int) -> Load:
    device = section.device
    counts = torch.tensor([-(-context // BLOCK_SIZE) for context in contexts])
    kv_bytes = 2 * sum(contexts) * KV_HEADS * HEAD_DIM * section.dtype.itemsize
    layers = 1 if section.cpu else max(1, min(8, 2**29 // kv_bytes))
    num_blocks = int(counts.sum())
    num_tokens = len(contexts) * queries
    shape = (2, layers, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    batch = Batch(
        kv_cache=KVCache(torch.empty(shape, dtype=section.dtype, device=device).normal_()),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),  # nothing is stored
        cu_seqlens_q=torch.arange(0, num_tokens + 1, queries, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        cu_blocks=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device),
        block_tables=torch.randperm(num_blocks, device=device).int(),
        num_decodes=len(contexts) if queries == 1 else 0,
        max_context=max(contexts),
    )
    q = torch.randn(num_tokens, HEADS, HEAD_DIM, device=device).to(section.dtype)
    return Load(batch, q, layers, kv_bytes)


def seconds_per_layer(call, layers: int, device) -> float:
    """Median of a few sweeps over all layers; on CUDA as a graph, or we would time Python's
    launches."""

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


@contextmanager
def attention_with(load: Load, choice: Choice) -> Iterator[Callable]:
    """A function of a layer. What cannot be launched raises when it is called."""
    from nanovllm.layers import triton_attention

    sizes = triton_attention.tile_sizes
    if choice.tile:
        sizes = lambda *_: triton_attention.Tile(*choice.tile)  # noqa: E731
    part = choice.part or triton_attention.PART
    call = partial(triton_attention.paged_attention, load.q, load.batch, scale=SCALE)
    with (
        mock.patch.object(triton_attention, "tile_sizes", sizes),
        mock.patch.object(triton_attention, "PART", part),
        torch.inference_mode(),
    ):
        load.batch.layout = choice.splits or triton_attention.layout(load.batch)
        yield call


def time_of(section: Section, load: Load, choice: Choice, expected: torch.Tensor) -> dict:
    """Microseconds of a choice, and how far off its result is. A choice may need more registers or
    shared memory than there are, for example: then why."""
    try:
        with attention_with(load, choice) as call:
            error = (call(layer=0).float() - expected.float()).abs().max().item()
            seconds = seconds_per_layer(call, load.layers, section.device)
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {problem}"}
    row = {"us": 1e6 * seconds, "difference": error}
    if not error <= ALLOWED * expected.abs().max().item():  # or it is NaN
        row["failed"] = f"it differs by {error:g}"
    return row


def described(choice: Choice) -> dict:
    """A choice as the start of a row."""
    tile = "default"
    if choice.tile:
        tile = " ".join(map(str, choice.tile[1:]))
    return {"tile": tile, "splits": choice.splits, "part": choice.part}


def decode_choices(section: Section) -> list[Choice]:
    """The engine's own choice is first."""
    choices = [Choice()]
    for tile in DECODE_TILES[: section.sizes.tiles]:
        choices += [Choice((1, 16, *tile), splits) for splits in section.sizes.splits]
    return choices


def prefill_choices(section: Section) -> list[Choice]:
    """The engine's own choice is first."""
    choices = [Choice(splits=1)]
    for rows, *others in PREFILL_TILES[: section.sizes.tiles]:
        tile = (rows * KV_HEADS // HEADS, rows, *others)
        choices.append(Choice(tile, splits=1))
    return choices


def part_choices(section: Section) -> list[Choice]:
    """With as many splits as fill the GPU, and with as many as there may be: few sequences leave
    most of it without work."""
    most = 2 if section.cpu else 32
    return [Choice(None, splits, part) for part in section.sizes.parts for splits in (0, most)]


def compile_choice(cpu: bool, choice: Choice, queries: int) -> None:
    """In another process: leaves the kernel in Triton's cache on disk."""
    section = Section(Path(), cpu, Path())
    load = new_load(section, [64, 32], queries)
    with suppress(Exception), attention_with(load, choice) as call:
        call(layer=0)  # what fails is reported when it is measured


def compile_choices(section: Section, decode: list[Choice], prefill: list[Choice]) -> dict:
    """What is not compiled in its time will be when it is measured."""
    kinds = [(section.cpu, choice, 1) for choice in decode]
    kinds += [(section.cpu, choice, 8) for choice in prefill]
    start = time.perf_counter()
    with get_context("spawn").Pool(1 if section.cpu else 8) as pool, suppress(TimeoutError):
        pool.starmap_async(compile_choice, kinds, chunksize=1).get(COMPILE_SECONDS)
    return {"seconds": time.perf_counter() - start, "kernels": len(kinds)}


def sweep(section: Section) -> None:
    """Tiles and splits of decodes, as a share of a copy's speed, and of prompts, of a product's;
    and tiles of the sampler."""
    sizes = section.sizes
    decode = decode_choices(section)
    parts = part_choices(section)
    prefill = prefill_choices(section)
    section.case("compile", partial(compile_choices, section, [*parts, *decode], prefill))
    times = section.case("sampler", partial(sampler_times, section))
    show("sampler: tile, warps|ms", [("ms", ",.3f")], milliseconds(times))
    measured = lambda: this_machine(section.device, section.dtype)._asdict()  # noqa: E731
    ceilings = section.case("ceilings", measured)
    if "error" in ceilings:
        return
    swept = partial(swept_case, section, Hardware(**ceilings))
    prompts, length = sizes.prefill
    for mean in sizes.contexts:
        for count in sizes.few:
            swept(f"parts: {count} x {mean}", contexts_around(mean, count), 1, parts)
    swept("prompts", [length] * prompts, length, prefill)
    for mean in sizes.contexts:
        for count in sizes.swept:
            swept(f"{count} x {mean}", contexts_around(mean, count), 1, decode)


def contexts_around(mean: int, count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randint(mean // 2, mean * 3 // 2) for _ in range(count)]


class Relaunched:
    """The kernel of the sampler, with another tile and other warps than the engine's."""

    def __init__(self, kernel, tile: int, warps: int):
        self.kernel = kernel
        self.tile = tile
        self.warps = warps

    def __getitem__(self, grid: tuple) -> Callable:
        return partial(self.launch, grid)

    def launch(self, grid: tuple, *args, **_) -> None:
        """The tile is the last argument."""
        self.kernel[grid](*args[:-1], self.tile, num_warps=self.warps)


def sampler_times(section: Section) -> dict:
    """Milliseconds for a batch of logits, by tile and warps."""
    from nanovllm.layers import triton_ops

    call = partial(triton_ops.sample, *sampled_rows(section))
    medians = {}
    for tile, warps in SAMPLER_TILES:
        kernel = Relaunched(triton_ops.sample_kernel, tile, warps)
        with mock.patch.object(triton_ops, "sample_kernel", kernel):
            call()  # which compiles
            times = [seconds_behind_a_pause(section, call) for _ in range(section.sizes.steps)]
        medians[f"{tile} {warps}"] = 1000 * (percentile(times, 50) or 0.0)
    return medians


def swept_case(
    section: Section,
    hardware: Hardware,
    name: str,
    contexts: list[int],
    queries: int,
    choices: list[Choice],
) -> None:
    """Measures the choices for one batch, and prints the best five."""
    facts = section.case(name, partial(swept, section, hardware, contexts, queries, choices))
    best = {f"{i}: {row['tile']}": row for i, row in enumerate(facts.get("rows", [])[:5], 1)}
    columns = [("splits", ""), ("part", ""), ("us", ",.1f")]
    columns += [("share", ".0%"), ("difference", ".0e")]
    show(f"{name}|splits|part|us|share|error", columns, best)


def swept(
    section: Section,
    hardware: Hardware,
    contexts: list[int],
    queries: int,
    choices: list[Choice],
) -> dict:
    """All choices, best first; `share` is the floor by the time."""
    load = new_load(section, contexts, queries)
    pairs = sum(visible_keys(queries, context) for context in contexts)
    floor = 4 * HEADS * HEAD_DIM * pairs / hardware.flops_per_second
    if queries == 1:
        floor = load.kv_bytes / hardware.bytes_per_second
    expected = attention.paged_attention(load.q, load.batch, 0, SCALE)
    rows = []
    for choice in choices:
        row = described(choice) | time_of(section, load, choice, expected)
        if "us" in row:
            row["share"] = floor / row["us"] * 1e6
        rows.append(row)
    rows.sort(key=lambda row: row.get("us", float("inf")))
    wrong = [row for row in rows if "failed" in row]
    error = {"error": f"{len(wrong)} choices failed: {wrong[0]}"} if wrong else {}
    return {"rows": rows} | error


if __name__ == "__main__":
    run(sweep)
