"""Section 5: which tiles and splits of attention are fastest."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from nanovllm.layers import attention
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.simulator.cost_model import Hardware, visible_keys
from tutorials.performance.attention import seconds_per_layer
from tutorials.performance.first_contact.job import Job
from tutorials.performance.first_contact.kernels import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    difference,
    randn,
)
from tutorials.performance.first_contact.section import Section
from tutorials.performance.machine import this_machine

Tile = tuple[int, ...] | None  # tokens, rows, keys, warps, stages; None is the kernel's own
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


class Swept(NamedTuple):
    """Sequences with equally many queries, over so many layers that no cache holds their keys."""

    batch: Batch
    q: torch.Tensor
    layers: int
    kv_bytes: int  # per layer


def swept(section: Section, contexts: list[int], queries: int) -> Swept:
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
    return Swept(batch, randn(section, num_tokens, HEADS, HEAD_DIM), layers, kv_bytes)


@contextmanager
def attention_with(case: Swept, tile: Tile, splits: int) -> Iterator[Callable]:
    """A function of a layer. What cannot be launched raises when it is called."""
    from nanovllm.layers import triton_attention

    sizes = triton_attention.tile_sizes
    if tile:
        sizes = lambda *_: triton_attention.Tile(*tile)  # noqa: E731
    case.batch.layout = splits or triton_attention.layout(case.batch)
    call = partial(triton_attention.paged_attention, case.q, case.batch, scale=SCALE)
    with mock.patch.object(triton_attention, "tile_sizes", sizes), torch.inference_mode():
        yield call


def tile_time(
    section: Section, case: Swept, tile: Tile, splits: int, expected: torch.Tensor
) -> dict:
    """Microseconds of a tile, and how far off its result is."""
    with attention_with(case, tile, splits) as call:
        checked = difference(call(layer=0), expected)
        return checked | {"us": 1e6 * seconds_per_layer(call, case.layers, section.device)}


def all_times(
    section: Section, case: Swept, tiles: list[tuple[Tile, int]], floor_seconds: float
) -> dict:
    """Of all (tile, splits), best first; `share` is the floor by the time."""
    expected = attention.paged_attention(case.q, case.batch, 0, SCALE)
    rows: list[dict] = []
    for tile, splits in tiles:
        if section.seconds_left() < 0:
            break
        row = {"tile": " ".join(map(str, tile[1:] if tile else ["default"])), "splits": splits}
        try:
            row |= tile_time(section, case, tile, splits, expected)
            row["share"] = floor_seconds / row["us"] * 1e6
        except Exception as error:  # more registers or shared memory than there are, for example
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        if "failed" in row and section.why_lost():
            break
    rows.sort(key=lambda row: row.get("us", float("inf")))
    result: dict = {"rows": rows, "left_out": len(tiles) - len(rows)}
    wrong = [row for row in rows if "error" in row or "failed" in row]
    return result | {"error": f"{len(wrong)} tiles failed: {wrong[0]}"} if wrong else result


def tiles_of(section: Section) -> tuple[list[tuple[Tile, int]], list[tuple[Tile, int]]]:
    """(decode, prefill), each a list of (tile, splits); the kernel's own choice is first."""
    group = HEADS // KV_HEADS
    decode: list[tuple[Tile, int]] = [(None, 0)]
    for tile in DECODE_TILES[: section.sizes.tiles]:
        decode += [((1, 16, *tile), splits) for splits in section.sizes.swept_splits]
    prefill: list[tuple[Tile, int]] = [(None, 1)]
    for rows, *others in PREFILL_TILES[: section.sizes.tiles]:
        prefill.append(((rows // group, rows, *others), 1))
    return decode, prefill


def compile_tile(job: Job, folder: Path, tile: Tile, splits: int, queries: int) -> None:
    """In another process: leaves the kernel in Triton's cache on disk."""
    section = Section(job, folder)
    case = swept(section, [64, 32], queries)
    with suppress(Exception), attention_with(case, tile, splits) as call:
        call(layer=0)  # what fails is reported by who measures it


def compile_tiles(section: Section, decode: list, prefill: list) -> dict:
    """Who hangs is ended after half of the time: then tiles are compiled when they are measured."""
    kinds = [(*tile, 1) for tile in decode] + [(*tile, 8) for tile in prefill]
    compiled = partial(compile_tile, section.job, section.folder)
    start = time.perf_counter()
    with get_context("spawn").Pool(1 if section.cpu else 8) as pool:  # whose end ends all workers
        pool.starmap_async(compiled, kinds, chunksize=1).get(section.seconds_left() / 2)
    return {"seconds": time.perf_counter() - start, "kernels": len(kinds)}


def sweep(section: Section) -> None:
    """Tiles and splits of decodes, as a share of a copy's speed, and of prompts, of a product's."""
    sizes = section.sizes
    decode, prefill = tiles_of(section)
    section.case("compile", partial(compile_tiles, section, decode, prefill))
    measured = lambda: this_machine(section.device, section.dtype)._asdict()  # noqa: E731
    section.case("ceilings", measured)
    if "name" not in section.cases.get("ceilings", {}):
        return  # it has failed, or there was no time
    hardware = Hardware(**section.cases["ceilings"])
    prompts, length = sizes.prefill
    run = partial(swept_case, section, hardware)
    run("prompts", [length] * prompts, length, prefill)
    rng = random.Random(0)
    for mean in sizes.contexts:
        for count in sizes.swept:
            contexts = [rng.randint(mean // 2, mean * 3 // 2) for _ in range(count)]
            run(f"{count} x {mean}", contexts, 1, decode)


def swept_case(
    section: Section, hardware: Hardware, name: str, contexts: list[int], queries: int, tiles: list
) -> None:
    """Measures the tiles of one batch, and prints the best five."""

    def measured() -> dict:
        case = swept(section, contexts, queries)
        pairs = sum(visible_keys(queries, context) for context in contexts)
        floor = 4 * HEADS * HEAD_DIM * pairs / hardware.flops_per_second
        if queries == 1:
            floor = case.kv_bytes / hardware.bytes_per_second
        return all_times(section, case, tiles, floor)

    section.case(name, measured)
    rows = section.cases.get(name, {}).get("rows", [])
    best = {f"{i}: {row['tile']}": row for i, row in enumerate(rows[:5], 1)}
    columns = [("splits", ""), ("us", ",.1f"), ("share", ".0%"), ("difference", ".0e")]
    section.show(f"{name}|splits|us|share|error", columns, best)
