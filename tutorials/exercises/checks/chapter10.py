"""Checks of chapter 10: what each program computes, a block of keys, a window."""

import math
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from timeit import repeat

import numpy as np
import torch
from torch import Tensor

from tutorials.exercises.checks.expect import Wrong, expect, expect_linear, unchanged

IS_PLAYED = not torch.cuda.is_available()
if IS_PLAYED:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from nanovllm.layers import triton_attention  # noqa: E402
from tutorials.kernels import loads_of  # noqa: E402
from tutorials.measure.batches import random_batch  # noqa: E402

DEVICE = "cpu" if IS_PLAYED else "cuda"


def check_1(answers) -> None:
    for chunks in (
        [(20, 20), (5, 37)],
        [(3, 3)],
        [(8, 8), (8, 40)],
        [(9, 50), (16, 16), (2, 17), (7, 23)],
        [(2, 2), (2, 33), (2, 2), (30, 64)],
    ):
        right = as_the_kernel_does(*chunks) if IS_PLAYED else None
        said = [entry and (*map(int, entry),) for entry in unchanged(answers.programs, chunks)]
        text = f"programs({chunks}) is {said}, and should be {right}"
        expect(right is None or said == right, text)


@cache
def as_the_kernel_does(*chunks: tuple[int, int]) -> list[tuple[int, int, int] | None]:
    """From what each of its programs reads."""
    batch, _ = random_batch([*chunks], 1, 128, num_layers=1)
    total = sum(queries for queries, _ in chunks)
    q = torch.zeros(total, 2, 128)
    keys, _ = batch.kv_cache.layers[0]
    keys.nan_to_num_(0)
    with loads_of(q=q, keys=keys) as loads:
        batch.layout = triton_attention.layout(batch)
        grid = triton_attention.work_of(q, batch, 0, len(chunks))
        triton_attention.launch(q.clone(), q, batch, 0, 1.0, grid)
    starts = batch.cu_seqlens_q.tolist()
    found: list[tuple[int, int, int] | None] = []
    for program in range(total // 8 + len(chunks)):
        mine = [load for load in loads if load.program[0] == program]
        rows = [load.places[0] // 256 for load in mine if load.name == "q"]
        if not rows:
            found.append(None)
            continue
        seq = max(i for i, start in enumerate(starts) if start <= rows[0])
        found.append((seq, rows[0] - starts[seq], sum(load.name == "keys" for load in mine)))
    return found


# --- 10.2 ---
def rows(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    return rng.standard_normal((count, dim), dtype=np.float32)


def as_softmax(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    scores = keys.astype(np.float64) @ query
    weights = 2.0 ** (scores - scores.max())
    return weights @ values / weights.sum()


def check_2(answers) -> None:
    rng = np.random.default_rng(10)
    for what, counts, size in (
        ("one key", [1], -1.0),
        ("a block of 20 keys", [20], 1.0),
        ("blocks of 4, 4 and 2 keys", [4, 4, 2], 1.0),
        ("a block without keys, then one of 3", [0, 3], 1.0),
        ("a block of 3 keys, then one without", [3, 0], 1.0),
        ("scores up to 10,000", [4, 4], 3e3),
    ):
        query = rows(rng, 1, 8)[0] * np.float32(size)
        keys = rows(rng, 20 * len(counts), 8).reshape(-1, 20, 8)
        values = rows(rng, 20 * len(counts), 8).reshape(-1, 20, 8)
        is_real = np.arange(20) < np.array(counts)[:, None]
        right = as_softmax(query, keys[is_real], values[is_real])
        keys[~is_real] = values[~is_real] = np.nan
        sums, result = np.array([-np.inf, 0], np.float32), np.zeros(8, np.float32)
        for block, count in enumerate(counts):
            answers.add_block(query, keys[block], values[block], count, sums, result)
            text = f"{what}: the sums are {sums.tolist()} after block {block}, with a NaN"
            expect(not np.isnan(sums).any(), text)
        highest = max(keys[is_real].astype(np.float64) @ query)
        text = f"{what}: the maximum is {sums[0]:.4g}, and should be {highest:.4g}"
        expect(abs(sums[0] - highest) <= 1e-4 * max(1, abs(highest)), text)
        difference = np.abs(result / sums[1] - right).max()
        text = f"{what}: result / total is wrong by {difference:.2g}"
        expect(difference < 1e-3, text)
    expect_linear("keys in a block", partial(call_with, answers.add_block), 64)
    in_loops(answers.add_block)


def call_with(add_block, num_keys: int) -> Callable[[], None]:
    keys = np.ones((num_keys, 2), np.float32)
    sums = np.array([-np.inf, 0], np.float32)
    return partial(add_block, keys[0], keys, keys, num_keys, sums, np.zeros(2, np.float32))


def in_loops(add_block) -> None:
    """Compiles it, and prints its time for a long sequence beside that of PyTorch's gather."""
    expect(find_spec("numba"), "numba is not installed: it is the extra `cpu`")
    from numba import njit

    compiled = njit(fastmath={"reassoc", "contract"})(add_block)

    @njit
    def attend(query, keys, values, table, sums, result):
        for block in table:
            compiled(query, keys[block], values[block], 16, sums, result)

    rng = np.random.default_rng(11)
    keys, values = rows(rng, 8000, 128).reshape(2, 250, 16, 128)
    query, table = rows(rng, 1, 128)[0] / 8, rng.permutation(250)

    def yours() -> np.ndarray:
        sums, result = np.array([-np.inf, 0], np.float32), np.zeros(128, np.float32)
        attend(query, keys, values, table, sums, result)
        return result / sums[1]

    def gathered() -> Tensor:
        k, v = (torch.from_numpy(part)[table].flatten(0, 1) for part in (keys, values))
        return torch.softmax(k @ torch.from_numpy(query) * math.log(2), 0) @ v

    try:
        difference = np.abs(yours() - gathered().numpy()).max()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        what = f"{type(error).__name__}: {' '.join(lines[:2])}"
        raise Wrong(f"numba cannot compile it: {what}") from error
    expect(difference < 1e-3, f"compiled, it is wrong by {difference:.2g} after 250 blocks")
    times = [1e3 * min(repeat(call, number=1, repeat=20)) for call in (yours, gathered)]
    print("4,000 keys: yours {:.2f} ms, PyTorch with a gather {:.2f} ms".format(*times))


# --- 10.3 ---
def dense(queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    key = torch.arange(len(keys), device=DEVICE)
    position = key[-len(queries) :, None]
    is_visible = (key <= position) & (key > position - window)
    scores = (queries @ keys.T).masked_fill(~is_visible, -torch.inf)
    return torch.softmax(scores * math.log(2), 1) @ values


def check_3(answers) -> None:
    torch.manual_seed(10)
    for num_queries, num_keys, window in (
        (1, 40, 10),
        (16, 38, 10),  # the first query stands at 22: its last rows see no key of its first tile
        (40, 40, 10),
        (20, 20, 1),
        (33, 70, 5),
        (16, 34, 4),
        (23, 41, 64),
        (16, 40, 33),
    ):
        queries = torch.randn(num_queries, 16, device=DEVICE)
        keys, values = torch.randn(2, num_keys, 16, device=DEVICE)
        queries[1:2] *= 50  # large scores
        out = torch.full_like(queries, float("nan"))
        noted = loads_of(keys=keys) if IS_PLAYED else nullcontext([])
        with warnings.catch_warnings(), noted as loads:
            warnings.simplefilter("ignore")  # numpy's, of rows that are not stored
            answers.windowed(out, queries, keys, values, window)
        what = f"{num_queries} queries, {num_keys} keys, a window of {window}"
        rows = out.isnan().any(1).nonzero().flatten().tolist()
        expect(not rows, f"{what}: NaN in rows {rows[:5]}" + " and more" * (len(rows) > 5))
        difference = (out - dense(queries, keys, values, window)).abs().max().item()
        expect(difference < 1e-4, f"{what}: a number is wrong by {difference:.3f}")
        for program in range(-(-num_queries // 16) if IS_PLAYED else 0):
            num_read = sum(len(load.places) for load in loads if load.program[0] == program) // 16
            first = num_keys - num_queries + 16 * program
            end = min(first + 16, num_keys)
            start = max(0, first - window + 1)
            needed, enough = end - start, end - start // 16 * 16
            text = f"{what}: program {program} reads {num_read} keys, and {enough} are enough"
            expect(num_read <= enough, text)
            expect(num_read >= needed, f"{text}: your kernel must read {needed}")
