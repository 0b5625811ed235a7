"""Checks of chapter 11: the recording that fits, one that can be used, recordings of several sizes."""

import random
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tutorials.exercises.checks.expect import expect, unchanged


def check_1(answers) -> None:
    for sizes in ([1, 2, 4, 8], [16, 1, 48, 32, 4], [3]):
        for num_rows in range(1, 60):
            wanted = min((size for size in sizes if size >= num_rows), default=None)
            said = unchanged(answers.size_for, num_rows, sizes)
            text = f"size_for({num_rows}, {sizes}) should be {wanted}, but is {said}"
            expect(said == wanted, text)


NUM_SLOTS = 40
IN_USE = 7  # what the cache holds before the recording


class Model:
    """Writes ids into slots of a cache, and notes which inputs it was run on."""

    def __init__(self):
        self.cache = torch.full((NUM_SLOTS + 1,), IN_USE)  # the last slot is for nothing
        self.places = []  # in memory, of the ids and slots of each run

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.places.append((ids.data_ptr(), slots.data_ptr()))
        self.cache.index_copy_(0, slots, ids)
        return (ids * 7 + 3) % 1000

    @property
    def num_runs(self) -> int:
        return len(self.places)


class Rows(TorchDispatchMode):
    """Notes how many rows are written into the cache."""

    def __init__(self, cache: torch.Tensor):
        super().__init__()
        self.cache = cache
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index_copy_.default and args[0] is self.cache:
            self.count += len(args[2])
        return function(*args, **(kwargs or {}))


def check_2(answers) -> None:
    model = Model()
    recorded = answers.Recorded(model, 4, NUM_SLOTS)
    expect(model.num_runs == 1, f"the model should run once to be recorded; runs: {model.num_runs}")
    check_steps(recorded, model, [4], (4, 2, 3, 1, 4, 4, 2))


# --- 11.3 ---
def check_3(answers) -> None:
    sizes = [4, 1, 8, 2]
    model = Model()
    graphs = answers.Graphs(model, [*sizes], NUM_SLOTS)
    num_runs = model.num_runs
    expect(num_runs == 4, f"the model should run once for each of 4 sizes; runs: {num_runs}")
    num_places = len({*model.places})
    text = f"ids and slots of the recordings begin at {num_places} places, and not at one"
    expect(num_places == 1, text)
    check_steps(graphs, model, sizes, (4, 2, 3, 1, 8, 5, 9, 7, 2, 6, 10, 1, 3))


def check_steps(graphs, model: Model, sizes: list[int], steps: Iterable[int]) -> None:
    """Runs steps of so many rows. The model's cache and all results must be right."""
    written = model.cache[:NUM_SLOTS].tolist()
    is_untouched = written == [IN_USE] * NUM_SLOTS
    expect(is_untouched, "the recording itself has written into slots of the cache")
    wanted_cache = [IN_USE] * NUM_SLOTS
    kept = []
    rng = random.Random(0)
    for i, num_rows in enumerate(steps):
        ids = [rng.randrange(1000) for _ in range(num_rows)]
        slots = rng.sample(range(10) if i < 9 else range(NUM_SLOTS), num_rows)
        wanted = [(n * 7 + 3) % 1000 for n in ids]
        size = min((size for size in sizes if size >= num_rows), default=0)
        num_before = model.num_runs
        with Rows(model.cache) as rows:
            given = torch.tensor(ids), torch.tensor(slots)
            result = graphs.run(*given)
        num_runs = model.num_runs - num_before
        case = f"step {i + 1}, {num_rows} rows" + (f" of {size}" if size else "")
        if size:
            expect(num_runs == 0, f"{case}: the model ran again, and was not replayed")
            expect(rows.count == size, f"{case}: {rows.count} rows were replayed")
        else:
            expect(num_runs == 1, f"{case}: no recording is large enough; runs: {num_runs}")
            expect(rows.count == num_rows, f"{case}: the model computed {rows.count} rows")
        same = [one.tolist() for one in given] == [ids, slots]
        expect(same, f"{case}: the ids and slots that were given have been changed")
        expect(len(result) == num_rows, f"{case}: there are {len(result)} results")
        text = f"{case}: {ids} give {wanted}, but you say {result.tolist()}"
        expect(result.tolist() == wanted, text)
        for slot, one in zip(slots, ids):
            wanted_cache[slot] = one
        found = model.cache[:NUM_SLOTS].tolist()
        for slot in range(NUM_SLOTS):
            said = f"slot {slot} should hold {wanted_cache[slot]}, but holds {found[slot]}"
            expect(found[slot] == wanted_cache[slot], f"{case}: {said}")
        kept.append((i + 1, result, wanted))
    for number, result, wanted in kept:
        said = f"the results of step {number} were {wanted}, but now they are {result.tolist()}"
        expect(result.tolist() == wanted, said)
