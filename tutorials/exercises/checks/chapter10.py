"""Checks of chapter 10: what each program computes, parts that are joined, a window."""

import math
import os
import random
import warnings
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from tutorials.exercises.checks.expect import expect

IS_PLAYED = not torch.cuda.is_available()
if IS_PLAYED:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from nanovllm.layers import triton_attention  # noqa: E402
from tutorials.kernels import loads_of  # noqa: E402
from tutorials.performance.batches import random_batch  # noqa: E402

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
        said = [entry and (*map(int, entry),) for entry in answers.programs([*chunks])]
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
        triton_attention.launch(q.clone(), q, q, q, batch, 0, 1.0, 0, len(chunks), 1)
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

EMPTY = (-math.inf, 0.0, [0.0, 0.0])
Part = tuple[float, float, list[float]]


def part_of(scores: list[float], values: list[list[float]]) -> Part:
    if not scores:
        return EMPTY
    maximum = max(scores)
    weights = [2.0 ** (score - maximum) for score in scores]
    sums = [math.fsum(w * v[i] for w, v in zip(weights, values)) for i in range(2)]
    return maximum, math.fsum(weights), sums


def check_2(answers) -> None:
    rng = random.Random(10)
    cases = {"two empty parts": (0, 0, 1.0), "nothing and 3 keys": (0, 3, 1.0)}
    cases |= {"3 keys and nothing": (3, 0, 1.0), "2 and 5 keys": (2, 5, 5.0)}
    cases |= {"scores around 10,000": (3, 3, 1.0), "scores from -10,000 to 10,000": (4, 4, 1e4)}
    for name, (count, others, spread) in cases.items():
        shift = 1e4 if "around" in name else 0.0
        scores = [shift + spread * rng.uniform(-1, 1) for _ in range(count + others)]
        values = [[rng.uniform(-1, 1), rng.uniform(-1, 1)] for _ in scores]
        one = part_of(scores[:count], values[:count])
        other = part_of(scores[count:], values[count:])
        right = part_of(scores, values)
        for said in (answers.join(one, other), answers.join(other, one)):
            expect_same(name, said, right)
    low = part_of([-10_000.0], [[1.0, 1.0]])
    expect_same("scores of -10,000", answers.join(low, low), (-10_000.0, 2.0, [2.0, 2.0]))
    parts = [part_of([rng.gauss(0, 9)], [[1.0, rng.random()]]) for _ in range(20)]
    parts[::3] = [EMPTY] * 7
    joined = EMPTY
    for part in parts:
        joined = answers.join(joined, part)
    least = math.log2(joined[1]) + joined[0] if joined[1] > 0 else -math.inf
    most = max(part[0] for part in parts)
    expect(most <= least < most + 4, f"20 parts, 7 of them empty: the total is {joined[1]}")


def expect_same(name: str, said: Part, right: Part) -> None:
    for what, number, wanted in zip(
        ("maximum", "total", "result"),
        (said[0], said[1], *said[2]),
        (right[0], right[1], *right[2]),
    ):
        close = number == wanted or abs(number - wanted) <= 1e-6 * max(1e-3, abs(wanted))
        expect(close, f"{name}: the {what} should be {wanted:g}, and is {number:g}")
    results = zip(said[2], right[2])
    text = f"{name}: the result should be {right[2]}, and is {said[2]}"
    expect(all(abs(a - b) <= 1e-6 for a, b in results), text)


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
        (16, 34, 16),
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
        for program in {load.program[0] for load in loads}:
            num_read = sum(len(load.places) for load in loads if load.program[0] == program) // 16
            first = num_keys - num_queries + 16 * program
            end = min(first + 16, num_keys)
            enough = end - max(0, first - window + 1) // 16 * 16
            text = f"{what}: program {program} reads {num_read} keys, and {enough} are enough"
            expect(num_read <= enough, text)
