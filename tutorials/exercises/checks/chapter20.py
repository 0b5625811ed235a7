"""Checks of chapter 20: what differs in a row, mappings as Linux counts them, rows with few calls."""

import os
import random
from itertools import permutations

from nanovllm.topics.vattention.memory import MAPPINGS, HostMemory
from tutorials.exercises.checks.expect import counted, expect, unchanged

Table = list[int]

# --- 20.1 ---

CASES: list[tuple[Table, Table]] = [  # what a row shows, and what it shall show
    ([0, 2, 3], [0, 2, 3]),
    ([0, 2, 3], [0, 2, 3, 5]),
    ([], [4, 0]),
    ([0, 1, 4, 6], [0, 1]),
    ([3, 1], []),
    ([2, 3, 4, 5, 6], [2, 3, 4, 5, 7, 8, 9]),
    ([0, 4], [0, 6]),
    ([7, 1, 2], [0, 1, 2]),  # only the first one
    ([1, 2], [2, 1]),
    ([5, 1, 8], [5, 1]),
    ([1], [0]),
]


def check_1(answers) -> None:
    rng = random.Random(0)
    cases = [*CASES]
    for _ in range(100):
        shown, table = (rng.sample(range(500, 506), rng.randrange(6)) for _ in range(2))
        cases.append((shown, table))
    for shown, table in cases:
        judge_changes(answers, shown, table)


def judge_changes(answers, shown: Table, table: Table) -> None:
    case = f"the row shows {shown}, the table is {table}"
    found = [*unchanged(answers.changes, shown, table)]
    places = [place for place, _ in found]
    expect(len(places) == len({*places}), f"{case}: {found} has a place twice")
    now: dict[int, int | None] = dict(enumerate(shown)) | dict(found)
    seen = {place: block for place, block in now.items() if block is not None}
    wanted = dict(enumerate(table))
    expect(seen == wanted, f"{case}: after {found} it shows {seen}, not {wanted}")
    for place, block in found:
        was = shown[place] if place < len(shown) else None
        expect(was != block, f"{case}: place {place} is right already, and {found} touches it")


# --- 20.2 ---

ROWS: list[tuple[list[Table], int]] = [  # tables, and the places of a row
    ([[0]], 4),
    ([[0, 1, 2], [0, 3], []], 4),
    ([[0, 1], [0, 2]], 3),
    ([[2, 1, 0]], 3),
    ([[5, 6, 7, 8], [9, 10], [2, 1]], 4),  # 5 to 10 is one, over the end of a row
    ([[5, 6, 7], [8, 9]], 4),  # here a place is free between 7 and 8
    ([[0, 1], [0, 1], [0, 1]], 2),
    ([[3, 3]], 2),
    ([[1, 2], [], [3]], 2),
    ([[], []], 2),
]


def check_2(answers) -> None:
    is_linux = MAPPINGS.exists() and hasattr(os, "memfd_create")
    expect(is_linux, "this check asks Linux, and your system is another one")
    rng = random.Random(0)
    cases = [*ROWS]
    for _ in range(40):
        row_blocks = rng.randint(1, 4)
        tables = [random_table(rng, row_blocks) for _ in range(6)]
        cases.append((tables, row_blocks))
    for tables, row_blocks in cases:
        found = unchanged(answers.count_mappings, tables, row_blocks)
        wanted = mappings_of(tables, row_blocks)
        case = f"tables {tables} in rows of {row_blocks} places"
        expect(found == wanted, f"{case}: Linux counts {wanted}, you say {found}")


def random_table(rng: random.Random, row_blocks: int) -> Table:
    """Some blocks, often neighbors."""
    first = rng.randrange(4)
    table = [first + i for i in range(rng.randint(0, row_blocks))]
    if rng.random() < 0.3:
        rng.shuffle(table)
    return table


def mappings_of(tables: list[Table], row_blocks: int) -> int:
    """Maps them, and asks Linux."""
    page = HostMemory.page_bytes
    num_blocks = max([0, *(block for table in tables for block in table)]) + 1
    memory = HostMemory(num_blocks * page)
    before = num_lines()
    address = memory.reserve(len(tables) * row_blocks * page)
    for row, table in enumerate(tables):
        for i, block in enumerate(table, row * row_blocks):
            memory.map(address + i * page, block * page, page)
    return num_lines() - before


def num_lines() -> int:
    return MAPPINGS.read_text(encoding="utf-8").count("memfd:nanovllm")


# --- 20.3 ---

STEPS: list[tuple[str, list[Table]]] = [
    ("two prompts", [[0, 1], [0, 2]]),
    ("B has a new block", [[0, 1], [0, 2, 3]]),
    ("the same tables", [[0, 1], [0, 2, 3]]),
    ("A has a new block", [[0, 1, 4], [0, 2, 3]]),
    ("they come in another order", [[0, 2, 3], [0, 1, 4]]),
    ("A has ended, C comes", [[0, 2, 3], [5, 6]]),
    ("B goes on from what A has written", [[0, 1, 4, 7], [5, 6]]),
    ("one ends, two come", [[5, 6], [0, 2], [8]]),
    ("two samples begin with the same blocks", [[0, 9]]),
    ("the first sample gets a copy of block 9", [[0, 10], [0, 9]]),
    ("nobody", []),
    ("all rows", [[0, 9, 3], [4], [5, 6], [0, 10]]),
    ("the first is gone, and its row has too much", [[0], [5, 6], [0, 10]]),
]


class Memory:
    """What each row shows, and what was called."""

    def __init__(self, num_rows: int):
        self.rows: list[dict[int, int]] = [{} for _ in range(num_rows)]
        self.num_calls = 0

    def set_block(self, row: int, place: int, block: int | None) -> None:
        self.num_calls += 1
        if block is None:
            self.rows[row].pop(place, None)
        else:
            self.rows[row][place] = block

    def fewest_calls(self, tables: list[Table]) -> int:
        """Over all ways to give each table a row."""
        ways = permutations(self.rows, len(tables))
        return min(sum(map(distance, rows, tables)) for rows in ways)


def distance(row: dict[int, int], table: Table) -> int:
    """The places in which a row differs from a table."""
    wanted = dict(enumerate(table))
    return sum(row.get(place) != wanted.get(place) for place in row.keys() | wanted.keys())


def check_3(answers) -> None:
    judge_rows(answers, 4, STEPS)
    for seed in range(40):
        rng = random.Random(seed)
        num_rows = seed % 4 + 1
        steps = [(f"seed {seed}", random_tables(rng)[:num_rows]) for _ in range(12)]
        judge_rows(answers, num_rows, steps)
    rng = random.Random(40)
    judge_rows(answers, 4, [("seed 40", random_tables(rng)) for _ in range(60)])


def random_tables(rng: random.Random) -> list[Table]:
    return [rng.sample(range(5), rng.randint(1, 4)) for _ in range(rng.randint(0, 4))]


def judge_rows(answers, num_rows: int, steps: list[tuple[str, list[Table]]]) -> None:
    memory = Memory(num_rows)
    rows = answers.Rows(num_rows, memory.set_block)
    block_cls = counted(int)
    for i, (name, tables) in enumerate(steps, 1):
        case = f"step {i} ({name}), tables {tables}"
        fewest = memory.fewest_calls(tables)
        before = memory.num_calls
        found = [*rows.show([[*map(block_cls, table)] for table in tables])]
        expect(len(found) == len(tables), f"{case}: {len(tables)} rows are wanted, you say {found}")
        is_row = all(row in range(num_rows) for row in found)
        expect(is_row, f"{case}: rows are 0 to {num_rows - 1}, you say {found}")
        expect(len({*found}) == len(found), f"{case}: each needs a row of its own, you say {found}")
        for row, table in zip(found, tables):
            shown = memory.rows[row]
            is_shown = shown == dict(enumerate(table))
            expect(is_shown, f"{case}: row {row} is to show {table}, and shows {shown}")
        calls = memory.num_calls - before
        expect(calls == fewest, f"{case}: {calls} calls, and {fewest} are enough")
    kept = block_cls.num_alive
    expect(kept <= 100, f"{case}: your class keeps {kept} numbers of blocks, and the rows show 16")
