"""Checks of chapter 06: whose slot it is, a chunk without copies of keys, one block after the other."""

import random
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tutorials.exercises.checks.expect import expect, unchanged


def slot_of(table: list[int], i: int, block_size: int) -> int:
    return table[i // block_size] * block_size + i % block_size


def check_1(answers) -> None:
    rng = random.Random(0)
    loads = [([[9, 2], [5, 11, 0, 7], [3, 8, 1], [6]], [7, 13, 10, 3], 4, 12)]
    for _ in range(20):
        size = rng.choice([1, 3, 4, 16])
        contexts = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
        free = rng.sample(range(250), 250)
        tables = [[free.pop() for _ in range(-(-n // size))] for n in contexts]
        tables[-1].append(free.pop())  # a block for tokens to come
        loads.append((tables, contexts, size, 250))
    for tables, contexts, size, num_blocks in loads:
        right = {
            slot_of(table, i, size): (b, i)
            for b, (table, n) in enumerate(zip(tables, contexts))
            for i in range(n)
        }
        for slot in range(num_blocks * size):
            said = unchanged(answers.owner, slot, tables, contexts, size)
            what = f"slot {slot} of blocks of {size}, tables {tables}, contexts {contexts}"
            expect(said == right.get(slot), f"{what}: {right.get(slot)}, you say {said}")


# --- attention ---
class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that was made, and how many were copied."""

    numbers = 0
    copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("clone", "cat", "stack", "repeat"):
            self.copied += result.numel()
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numbers = max(self.numbers, size)
        return result


def dense(q, k, v):
    m, n, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    is_future = torch.arange(n) > torch.arange(n - m, n)[:, None]
    weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def check_2(answers) -> None:
    generator = torch.Generator().manual_seed(0)
    cases = ((7, 7, 6, 2, 64), (4, 40, 6, 2, 96), (1, 30, 6, 2, 64), (3, 50, 9, 3, 64))
    for m, n, heads, kv_heads, dim in cases:
        q = torch.randn(m, heads, dim, generator=generator)
        k, v = torch.randn(2, n, kv_heads, dim, generator=generator)
        given = q.clone(), k.clone(), v.clone()
        with Largest() as largest:
            said = answers.chunk(*given)
        what = f"{m} queries in a context of {n}, {heads} and {kv_heads} heads"
        expect(said.shape == q.shape, f"{what}: the result has shape {list(said.shape)}")
        rows = (said - dense(q, k, v)).abs().amax((1, 2))
        wrong = [row for row in range(m) if not rows[row] < 1e-4]
        expect(not wrong, f"{what}: the results of queries {wrong} are wrong")
        most = max(k.numel(), q.numel())
        sizes = f"a tensor of {largest.numbers:,} numbers was made; the keys have {k.numel():,}"
        expect(largest.numbers <= most, f"{what}: {sizes}")
        # PyTorch itself copies queries and weights to multiply them
        most = 2 * k.numel() + 3 * q.numel()
        copied = f"{largest.copied:,} numbers were copied, one head after the other"
        expect(largest.copied <= most, f"{what}: {copied}; keys and values have {2 * k.numel():,}")


def in_blocks(parts: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Keys and values of one block after the other, always in the same memory."""
    memory = torch.empty_like(parts[0])
    for part in parts:
        memory.fill_(torch.nan)
        count = part.shape[1]
        memory[:, :count] = part
        yield memory[0, :count], memory[1, :count]
    memory.fill_(torch.nan)


def check_3(answers) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, n, factor in (
        ("a context of 13", 13, 1),
        ("a context of one token", 1, 1),
        ("a context of 160", 160, 1),
        ("a query 200 times as large", 160, 200),
        ("a query 2,000 times as large", 160, 2000),
        ("scores that are all far below 0", 13, None),
        ("scores that grow from block to block", 40, "up"),
    ):
        dim = 8 + n % 5
        q = torch.randn(dim, generator=generator)
        k, v = torch.randn(2, n, dim, generator=generator)
        if factor is None:
            k = k / 10 - 1000 * q
        elif factor == "up":
            k = k + torch.arange(n)[:, None] * q / 4
        else:
            q = q * factor
        right = ((k @ q) / dim**0.5).softmax(0) @ v
        blocks = [part.clone() for part in torch.stack([k, v]).split(4, dim=1)]
        with Largest() as largest:
            said = answers.block_by_block(q.clone(), in_blocks(blocks))
        expect(said.shape == q.shape, f"{name}: the result has shape {list(said.shape)}")
        off = (said - right).abs().max().item()
        expect(off < 1e-3, f"{name}: the result is off by {off:.3g}")
        sizes = (
            f"a tensor of {largest.numbers:,} numbers was made; the keys of a block have {4 * dim}"
        )
        expect(largest.numbers <= 200, f"{name}: {sizes}")
        copied = f"{largest.copied:,} numbers were copied: blocks are to be used, and not kept"
        expect(largest.copied <= 200, f"{name}: {copied}")
