"""Checks of chapter 07: arrays by hand, tables as a rectangle, tables that stay."""

import random
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch.overrides import TorchFunctionMode

from nanovllm import LLM, SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from tutorials.exercises.checks.expect import expect, num_operations, unchanged


def plan_of(*parts: tuple[list[int], int, int, list[int]]) -> Schedule:
    """Token ids, start, number of tokens and block table of each sequence."""
    schedule = Schedule()
    for token_ids, start, num_tokens, block_table in parts:
        params = SamplingParams(temperature=0)
        (seq,) = Request("r", None, token_ids, params).sequences
        seq.block_table = block_table
        schedule.add(Item(seq, start, num_tokens))
    return schedule


def check_1(answers) -> None:
    cases = [(9, 6, 2, [5, 2, 8]), (9, 6, 3, [5, 2, 8]), (10, 0, 4, [3, 1, 0]), (1, 0, 1, [9])]
    cases += [(8, 7, 1, [4, 0]), (12, 4, 8, [1, 0, 2]), (90, 64, 20, [*range(40, 17, -1)])]
    cases += [(9, 4, 1, [5, 2, 8]), (3, 0, 1, [2])]  # chunks of one token, in the middle
    runners = {n: LLM(block_size=n, num_blocks=64, device="cpu").runner for n in (4, 16)}
    for (length, start, num_tokens, table), (size, runner) in product(cases, runners.items()):
        inputs = runner.prepare(plan_of((list(range(length)), start, num_tokens, table)))
        right = {
            "the positions": inputs.positions.tolist(),
            "the slots": inputs.batch.slot_mapping.tolist(),
            "the context": int(inputs.batch.context_lens[0]),
            "whether a row is sampled": len(inputs.sampled_rows) > 0,
        }
        said = unchanged(answers.arrays, list(range(length)), start, num_tokens, table, size)
        case = f"{num_tokens} of {length} tokens from {start} on, table {table}, blocks of {size}"
        expect(len(said) == 4, f"{case}: four results are wanted, but there are {len(said)}")
        for (name, value), one in zip(right.items(), said):
            one = list(one) if isinstance(value, list) else one
            expect(one == value, f"{case}: {name} should be {value}, but you say {one}")


class Touched(TorchFunctionMode):
    """Counts the numbers that leave their tensors and become Python's."""

    NAMES = ("tolist", "item", "__int__", "__index__", "unbind", "numpy", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.NAMES:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def ragged(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables with these numbers of blocks: all of them, and where each begins."""
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *counts]).cumsum(0)
    return blocks.int(), ends.int()


def check_2(answers) -> None:
    for counts in ([2, 3, 1], [1, 1], [4], [2, 0, 5], [0, 3], [3, 0], [0, 0]):
        blocks, ends = ragged(counts)
        wanted = [
            [*blocks[begin:end].tolist(), *[-1] * (max(counts) - (end - begin))]
            for begin, end in zip(ends.tolist(), ends.tolist()[1:])
        ]
        said = unchanged(answers.rectangle, blocks, ends)
        case = f"block_tables {blocks.tolist()}, cu_blocks {ends.tolist()}"
        text = f"{case}: a tensor is wanted, but it is a {type(said).__name__}"
        expect(isinstance(said, torch.Tensor), text)
        found = said.tolist()
        expect(found == wanted, f"{case}: it should be {wanted}, but is {found}")
    few, many = ragged([5, 4, 3]), ragged([500, 400, 300])
    more = num_operations(lambda: answers.rectangle(*many))
    more -= num_operations(lambda: answers.rectangle(*few))
    each = "more than for 12: it touches each block"
    expect(more < 300, f"for 1,200 blocks, Python runs {more:,} operations {each}")
    more = num_touched(answers, *many) - num_touched(answers, *few)
    expect(more < 300, f"for 1,200 blocks, {more:,} numbers become Python's, {each}")
    kind = answers.rectangle(*few).dtype
    expect(kind == torch.int32, f"the rectangle should be torch.int32, but is {kind}")


def num_touched(answers, block_tables: torch.Tensor, cu_blocks: torch.Tensor) -> int:
    with Touched() as touched:
        answers.rectangle(block_tables, cu_blocks)
    return touched.count


class Table(Sequence):
    """A block table that notes which of its places are read."""

    def __init__(self, blocks: list[int]):
        self.blocks = blocks
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, place):
        places = range(len(self.blocks))[place]
        self.read.update(places if isinstance(place, slice) else [places])
        return self.blocks[place]


def check_3(answers) -> None:
    steps = [
        {"A": [5, 2], "B": [7, 1]},
        {"B": [7, 1], "A": [5, 2, 8]},
        {"A": [5, 2, 8]},  # B is preempted
        {"A": [5, 2, 8, 6], "B": [4]},
        {"C": [3], "A": [5, 2, 8, 6]},
    ]
    check_steps(answers.Tables(2, 4), 4, steps)
    check_steps(answers.Tables(8, 9), 9, [*random_steps(random.Random(0), 200)])
    few, many = (work_of_a_step(answers.Tables(3, 10 * n), n) for n in (1, 100))
    more = [b - a for a, b in zip(few, many)]
    where = "where nothing is new, for 1,200 blocks"
    expect(more[0] < 300, f"{where}, Python runs {more[0]:,} operations more than for 12")
    expect(more[1] < 300, f"{where}, {more[1]:,} numbers more become Python's than for 12")


def work_of_a_step(kept, times: int) -> tuple[int, int]:
    """Operations of Python, and numbers that become Python's, in a step with the tables of the one
    before."""
    tables = {name: [*range(count * times)] for name, count in (("A", 5), ("B", 4), ("C", 3))}
    for _ in range(3):
        kept.step(tables)
    with Touched() as touched:
        kept.step(tables)
    return num_operations(lambda: kept.step(tables)), touched.count


def random_steps(rng: random.Random, count: int) -> Iterator[dict[str, list[int]]]:
    """Sequences come, grow, are preempted, come back with other blocks, and leave."""
    tables: dict[str, list[int]] = {}
    for _ in range(count):
        names = rng.sample("ABCDEFGHI", rng.randint(1, 8))
        tables = {
            name: [*tables.get(name, []), *(rng.randrange(99) for _ in range(rng.randint(0, 2)))]
            for name in names
        }
        tables = {name: table[:9] or [rng.randrange(99)] for name, table in tables.items()}
        yield tables


def check_steps(kept, columns: int, steps: list[dict[str, list[int]]]) -> None:
    before: dict[str, list[int]] = {}
    for i, blocks in enumerate(steps, 1):
        tables = {name: Table(table) for name, table in blocks.items()}
        said = kept.step(tables)
        case = f"step {i} with {', '.join(blocks)}"
        is_tensor = isinstance(said, torch.Tensor) and said.dtype == torch.int32
        expect(is_tensor, f"{case}: a tensor of torch.int32 is wanted")
        shape = [len(blocks), columns]
        expect([*said.shape] == shape, f"{case}: it should be {shape}, but is {[*said.shape]}")
        for (name, table), row in zip(blocks.items(), said.tolist()):
            wanted = table + [-1] * (columns - len(table))
            expect(row == wanted, f"{case}: {name}'s row should be {wanted}, but is {row}")
        for name, table in tables.items():
            again = sorted(i for i in table.read if i < len(before.get(name, [])))
            says = f"the blocks of {name} at {again} are not new, but they are read"
            expect(not again, f"{case}: {says}")
        before = blocks
