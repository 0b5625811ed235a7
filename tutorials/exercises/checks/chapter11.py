"""Checks of chapter 11: a cache's size, a recording that can be used, sizes to record."""

import random
from itertools import combinations

import torch

from tutorials.exercises.checks.expect import expect


def check_1(answers) -> None:
    gib = 2**30
    block = 16 * 112 * 1024
    cases = {
        (24 * 10**9, 0.9, 5 * 10**8, 27 * 10**8, block, 10**6): 10_027,
        (24 * gib, 0.9, 0, 2 * gib, block, 10**6): 11_468,
        (24 * gib, 0.9, 10 * gib, 2 * gib, block, 10**6): 5_617,
        (24 * gib, 1.0, 0, 0, 24 * gib, 10**6): 1,
        (24 * gib, 0.9, 0, 2 * gib, block, 500): 500,
        (24 * gib, 0.5, 10 * gib, 4 * gib, block, 10**6): 0,
        (10**9, 0.9, 0, 9 * 10**8 - 1, block, 10**6): 0,
    }
    for case, wanted in cases.items():
        said = answers.num_blocks(*case)
        expect(said == wanted, f"num_blocks{case} should be {wanted:,}, but is {said:,}")


IN_USE = 7  # what the cache holds before the recording


class Model:
    """Writes ids into slots of a cache, and sees how often it is run."""

    def __init__(self, num_slots: int):
        self.cache = torch.full((num_slots + 1,), IN_USE)  # the last slot is for nothing
        self.num_runs = 0

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        self.cache.index_copy_(0, slots, ids)
        return (ids * 7 + 3) % 1000


def check_2(answers) -> None:
    num_slots = 40
    model = Model(num_slots)
    recorded = answers.Recorded(model, 4, num_slots)
    expect(model.num_runs == 1, f"the model should run once to be recorded; runs: {model.num_runs}")
    written = [int(value) for value in model.cache[:num_slots]]
    is_untouched = written == [IN_USE] * num_slots
    expect(is_untouched, "the recording itself has written into slots of the cache")
    wanted_cache = [IN_USE] * num_slots
    kept = []
    rng = random.Random(0)
    for i, num_rows in enumerate((4, 2, 3, 1, 4, 4, 2)):
        ids = [rng.randrange(1000) for _ in range(num_rows)]
        slots = rng.sample(range(8) if i < 5 else range(num_slots), num_rows)
        wanted = [(n * 7 + 3) % 1000 for n in ids]
        result = recorded.run(torch.tensor(ids), torch.tensor(slots))
        case = f"step {i + 1}, {num_rows} rows of 4"
        runs = model.num_runs
        expect(
            runs == 1, f"{case}: the model ran again ({runs} times in all), and was not replayed"
        )
        expect(len(result) == num_rows, f"{case}: there are {len(result)} results")
        expect(
            result.tolist() == wanted, f"{case}: {ids} give {wanted}, but you say {result.tolist()}"
        )
        for slot, one in zip(slots, ids):
            wanted_cache[slot] = one
        found = model.cache[:num_slots].tolist()
        wrong = [slot for slot in range(num_slots) if found[slot] != wanted_cache[slot]]
        if wrong:
            slot = wrong[0]
            said = f"slot {slot} should hold {wanted_cache[slot]}, but holds {found[slot]}"
            expect(False, f"{case}: {said}")
        kept.append((i + 1, result, wanted))
    for number, result, wanted in kept:
        said = f"the results of step {number} were {wanted}, but now they are {result.tolist()}"
        expect(result.tolist() == wanted, said)


def rows_of(counts: dict[int, int], sizes: list[int]) -> int:
    return sum(steps * min(s for s in sizes if s >= n) for n, steps in counts.items() if steps)


def check_3(answers) -> None:
    rng = random.Random(0)
    cases = [({1: 5, 2: 1, 3: 5, 9: 1}, 2), ({7: 3}, 1), ({1: 100, 100: 1}, 1), ({1: 1, 2: 1}, 5)]
    cases.append(({1: 1, 2: 1, 3: 1, 4: 100, 5: 1, 6: 1, 7: 100, 8: 1}, 3))
    cases.append(({2: 1, 5: 1, 8: 0}, 1))
    for _ in range(20):
        largest = rng.randint(2, 10)
        cases.append(({n: rng.randint(0, 30) for n in range(1, largest)} | {largest: 1}, 3))
    for counts, k in cases:
        present = [n for n, steps in counts.items() if steps]
        fewest = min(
            rows_of(counts, [*chosen, max(present)])
            for chosen in combinations(present, min(k, len(present)) - 1)
        )
        said = list(answers.best_sizes(dict(counts), k))
        case = f"counts {counts}, k={k}"
        expect(len(said) <= k, f"{case}: {said} are more than {k} sizes")
        expect(said == sorted(said), f"{case}: {said} are not in ascending order")
        largest = f"{case}: some steps have {max(present)} decodes, but your sizes are {said}"
        expect(said and said[-1] >= max(present), largest)
        rows = rows_of(counts, said)
        expect(
            rows == fewest, f"{case}: with {said}, {rows} rows are computed; {fewest} are enough"
        )
    many = {n: 1 + n % 7 for n in range(1, 129)}
    said = answers.best_sizes(many, 8)
    rows = rows_of(many, said)
    expect(
        rows == 36_280, f"1 to 128 decodes, 8 sizes: {rows:,} rows are computed; 36,280 are enough"
    )
