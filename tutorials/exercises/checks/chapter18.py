"""Checks of chapter 18: the parts of an MLP and of attention, an all-reduce around a ring."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tutorials.exercises.checks.expect import Wrong, expect, unchanged


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def expect_same(found: Tensor, wanted: Tensor, what: str) -> None:
    text = f"{what} of the shape {[*found.shape]}: {[*wanted.shape]} is right"
    expect(found.shape == wanted.shape, text)
    worst = float((found - wanted).abs().max())
    expect(worst < 1e-9, f"{what} that is off by {worst:.2g}")


# --- 18.1 ---
def check_1(answers) -> None:
    for middle, num_ranks in ((10, 1), (10, 2), (10, 5), (10, 3), (10, 4), (10, 7), (3, 5)):
        judge_mlp(answers, middle, num_ranks)


def judge_mlp(answers, middle: int, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(middle)
    shapes = (middle, 8), (middle, 8), (8, middle)
    weights = [random(generator, *shape) for shape in shapes]
    mlp = answers.MLP(*weights)
    parts = [unchanged(answers.mlp_part, mlp, rank, num_ranks) for rank in range(num_ranks)]
    case = f"a middle of {middle}, {num_ranks} ranks"
    size = -(-middle // num_ranks)
    for rank, part in enumerate(parts):
        found = [[*weight.shape] for weight in part]
        wanted = [[size, 8], [size, 8], [8, size]]
        expect(found == wanted, f"{case}: rank {rank} has the shapes {found}, not {wanted}")
    x = random(generator, 8)
    summands = [mlp_of(part, x) for part in parts]
    expect_same(sum(summands), mlp_of(weights, x), f"{case}: the sum of the ranks is a vector")
    for i, (what, name) in enumerate((("row", "gate"), ("row", "up"), ("column", "down"))):
        weight, *found = [each[i].T if name == "down" else each[i] for each in (weights, *parts)]
        padded = F.pad(weight, [0, 0, 0, size * num_ranks - middle])
        where = (torch.cat(found) != padded).any(1).nonzero().flatten().tolist()
        text = f"{case}: {what} {where[:1]} of all parts of {name} is another one in {name}"
        expect(not where, text)


def mlp_of(mlp: Any, x: Tensor) -> Tensor:
    gate, up, down = mlp
    return down @ (F.silu(gate @ x) * (up @ x))


# --- 18.2 ---

HEAD_DIM, HIDDEN = 4, 6
# query heads, KV heads, ranks
DIVISIBLE = ((4, 4, 1), (4, 4, 2), (8, 2, 2), (8, 4, 2), (8, 2, 4), (8, 2, 8), (12, 3, 6))
DIVISIBLE += ((4, 1, 2), (6, 3, 3))
INDIVISIBLE = ((8, 2, 3), (12, 3, 2), (4, 4, 8), (12, 4, 6), (6, 1, 4))


def check_2(answers) -> None:
    for heads, kv_heads, num_ranks in DIVISIBLE:
        judge_attention(answers, heads, kv_heads, num_ranks)
    for heads, kv_heads, num_ranks in INDIVISIBLE:
        whole = new_attention(answers, heads, kv_heads)
        try:
            answers.attention_part(whole, HEAD_DIM, 0, num_ranks)
        except ValueError:
            continue
        raise Wrong(f"{case_of(heads, kv_heads, num_ranks)}: no ValueError")


def case_of(heads: int, kv_heads: int, num_ranks: int) -> str:
    return f"{heads} query heads, {kv_heads} KV heads, {num_ranks} ranks"


def new_attention(answers, heads: int, kv_heads: int) -> Any:
    generator = torch.Generator().manual_seed(heads)
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = (q, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (q,), (HIDDEN, q), (HIDDEN,)
    return answers.Attention(*(random(generator, *shape) for shape in shapes))


def judge_attention(answers, heads: int, kv_heads: int, num_ranks: int) -> None:
    case = case_of(heads, kv_heads, num_ranks)
    whole = new_attention(answers, heads, kv_heads)
    ranks = range(num_ranks)
    parts = [unchanged(answers.attention_part, whole, HEAD_DIM, rank, num_ranks) for rank in ranks]
    q = heads // num_ranks
    kv = max(1, kv_heads // num_ranks)
    for rank, part in enumerate(parts):
        found = {name: len(getattr(part, name)) / HEAD_DIM for name in "qkv"}
        for name, wanted in {"q": q, "k": kv, "v": kv}.items():
            said = f"{case}: rank {rank} has {found[name]:g} heads in {name}, {wanted} is right"
            expect(found[name] == wanted, said)
        shapes = [[*weight.shape] for weight in part[3:]]
        wanted = [[q * HEAD_DIM], [HIDDEN, q * HEAD_DIM], [HIDDEN]]
        text = f"{case}: the shapes of q_bias, o and o_bias are {shapes}, not {wanted}"
        expect(shapes == wanted, text)
    x = random(torch.Generator().manual_seed(1), 5, HIDDEN)
    summands = [attention_of(part, x) for part in parts]
    expect_same(sum(summands), attention_of(whole, x), f"{case}: the sum of the ranks is a tensor")


def attention_of(attention: Any, x: Tensor) -> Tensor:
    """Of five tokens in a row."""
    q, k, v, q_bias, o, o_bias = attention
    heads = [x @ q.T + q_bias, x @ k.T, x @ v.T]
    heads = [one.unflatten(1, (-1, HEAD_DIM)).transpose(0, 1) for one in heads]
    attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return attended.transpose(0, 1).flatten(1) @ o.T + o_bias


# --- 18.3 ---
class Stuck(Exception):
    """A rank waits forever, or another one has failed."""


class Wires:
    """From each rank to the next one. Notices when all ranks wait forever."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.messages: list[Tensor | None] = [None] * num_ranks  # to each rank
        self.num_sent = [0] * num_ranks  # numbers
        self.changed = Condition()
        self.waiting: dict[int, tuple[int, bool]] = {}  # the wire, and whether it must be full
        self.ended: set[int] = set()
        self.is_over = False

    def send(self, rank: int, x: Tensor) -> None:
        right = (rank + 1) % self.num_ranks
        with self.changed:
            self.wait(rank, right, must_be_full=False)
            self.messages[right] = x.clone()
            self.num_sent[rank] += x.numel()
            self.changed.notify_all()

    def receive(self, rank: int) -> Tensor:
        with self.changed:
            self.wait(rank, rank, must_be_full=True)
            x = self.messages[rank]
            assert x is not None
            self.messages[rank] = None
            self.changed.notify_all()
        return x

    def wait(self, rank: int, wire: int, must_be_full: bool) -> None:
        self.waiting[rank] = wire, must_be_full
        while not self.can_go_on(rank):
            self.look()
            if self.is_over:
                raise Stuck
            self.changed.wait()
        del self.waiting[rank]

    def can_go_on(self, rank: int) -> bool:
        wire, must_be_full = self.waiting[rank]
        return (self.messages[wire] is not None) == must_be_full

    def look(self) -> None:
        """It is over if each rank that has not ended waits, and none can go on."""
        num_at_work = self.num_ranks - len(self.waiting) - len(self.ended)
        if self.waiting and not num_at_work and not any(map(self.can_go_on, self.waiting)):
            self.is_over = True
            self.changed.notify_all()

    def said(self) -> str:
        """What the first of those that wait forever waits for."""
        rank = min(self.waiting)
        _, must_be_full = self.waiting[rank]
        reason = "no message comes" if must_be_full else "its last message is not taken"
        return f"rank {rank} waits forever: {reason}"

    def end(self, rank: int, has_failed: bool) -> None:
        with self.changed:
            self.ended.add(rank)
            self.is_over = self.is_over or has_failed
            self.look()
            self.changed.notify_all()


def check_3(answers) -> None:
    cases = (1, 8), (2, 8), (3, 9), (4, 240), (3, 10), (4, 6), (5, 12), (11, 3), (7, 1)
    for num_ranks, length in cases:
        judge_ring(answers.ring, num_ranks, length)


def judge_ring(ring: Callable, num_ranks: int, length: int) -> None:
    case = f"{num_ranks} ranks, {length} numbers"
    generator = torch.Generator().manual_seed(length)
    vectors = [random(generator, length) for _ in range(num_ranks)]
    total = torch.stack(vectors).sum(0)
    given = [vector.clone() for vector in vectors]
    wires = Wires(num_ranks)

    def run(rank: int) -> Tensor | None:
        has_failed = True
        try:
            result = ring(
                rank,
                num_ranks,
                given[rank],
                lambda x: wires.send(rank, x),
                lambda: wires.receive(rank),
            )
            has_failed = False
        except Stuck:
            return None
        finally:
            wires.end(rank, has_failed)
        return result

    with ThreadPoolExecutor(num_ranks) as pool:
        results = [*pool.map(run, range(num_ranks))]
    if wires.waiting:
        raise Wrong(f"{case}: {wires.said()}")
    for rank, result in enumerate(results):
        expect(isinstance(result, Tensor), f"{case}: rank {rank} returns {result!r}")
        expect_same(result, total, f"{case}: rank {rank} has a sum")
        same = torch.equal(result, results[0])
        expect(same, f"{case}: ranks 0 and {rank} have other last bits, so they drift apart")
        expect(given[rank].equal(vectors[rank]), f"{case}: rank {rank} has changed its vector `x`")
    left = sum(message is not None for message in wires.messages)
    expect(left == 0, f"{case}: {left} messages were sent, and not received")
    for rank, num_sent in enumerate(wires.num_sent):
        said = f"{case}: rank {rank} sends {num_sent} numbers: the next rank needs {length}"
        expect(num_sent >= length or num_ranks == 1, f"{said} of it to know the sum")
    most = 2 * (num_ranks - 1) * -(-length // num_ranks)
    worst = max(wires.num_sent)
    rank = wires.num_sent.index(worst)
    expect(worst <= most, f"{case}: rank {rank} sends {worst} numbers, and {most} are enough")
