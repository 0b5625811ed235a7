"""Answers to the exercises of chapter 11 that must not pass: exercise, code, a part of what is said."""

WRONG = {
    "a part of what others have left": (
        "11.1",
        """
def num_blocks(total, utilization, others, peak, block_bytes, useful):
    left = int((total - others) * utilization) - peak
    return max(0, min(left // block_bytes, useful))
""",
        "should be 10,027, but is",
    ),
    "more than can be filled": (
        "11.1",
        """
def num_blocks(total, utilization, others, peak, block_bytes, useful):
    return max(0, (int(total * utilization) - others - peak) // block_bytes)
""",
        "should be 500, but is 11,468",
    ),
    "fewer than none": (
        "11.1",
        """
def num_blocks(total, utilization, others, peak, block_bytes, useful):
    return min((int(total * utilization) - others - peak) // block_bytes, useful)
""",
        "should be 0, but is -",
    ),
    "a new tensor": (
        "11.2",
        """
class Recorded:
    def __init__(self, model, size, no_slot):
        self.size, self.no_slot = size, no_slot
        self.ids = torch.zeros(size, dtype=torch.int64)
        self.slots = torch.full((size,), no_slot)
        with Recorder() as self.recorder:
            self.result = model(self.ids, self.slots)

    def run(self, ids, slots):
        rest = self.size - len(ids)
        self.ids = torch.cat([ids, torch.zeros(rest, dtype=torch.int64)])
        self.slots = torch.cat([slots, torch.full((rest,), self.no_slot)])
        self.recorder.replay()
        return self.result[: len(ids)].clone()
""",
        "step 1, 4 rows of 4: .* but you say",
    ),
    "slots of the step before": (
        "11.2",
        """
class Recorded:
    def __init__(self, model, size, no_slot):
        self.ids = torch.zeros(size, dtype=torch.int64)
        self.slots = torch.full((size,), no_slot)
        with Recorder() as self.recorder:
            self.result = model(self.ids, self.slots)

    def run(self, ids, slots):
        self.ids[: len(ids)] = ids
        self.slots[: len(ids)] = slots
        self.recorder.replay()
        return self.result[: len(ids)].clone()
""",
        "slot .* should hold .*, but holds",
    ),
    "the next replay changes the results": (
        "11.2",
        """
class Recorded:
    def __init__(self, model, size, no_slot):
        self.no_slot = no_slot
        self.ids = torch.zeros(size, dtype=torch.int64)
        self.slots = torch.full((size,), no_slot)
        with Recorder() as self.recorder:
            self.result = model(self.ids, self.slots)

    def run(self, ids, slots):
        self.slots.fill_(self.no_slot)
        self.ids[: len(ids)] = ids
        self.slots[: len(ids)] = slots
        self.recorder.replay()
        return self.result[: len(ids)]
""",
        "the results of step 1 were .* but now they are",
    ),
    "no recording at all": (
        "11.2",
        """
class Recorded:
    def __init__(self, model, size, no_slot):
        self.model = model
        model(torch.zeros(size, dtype=torch.int64), torch.full((size,), no_slot))

    def run(self, ids, slots):
        return self.model(ids, slots)
""",
        "the model ran again",
    ),
    "recorded with slots that are in use": (
        "11.2",
        """
class Recorded:
    def __init__(self, model, size, no_slot):
        self.ids = torch.ones(size, dtype=torch.int64)
        self.slots = torch.arange(size)
        with Recorder() as self.recorder:
            self.result = model(self.ids, self.slots)

    def run(self, ids, slots):
        raise ValueError
""",
        "the recording itself has written into slots",
    ),
    "powers of two": (
        "11.3",
        """
def best_sizes(counts, k):
    largest = max(n for n, steps in counts.items() if steps)
    sizes = {largest}
    size = 1
    while size < largest:
        sizes.add(size)
        size *= 2
    return sorted(sizes)[-k:]
""",
        "rows are computed",
    ),
    "the most frequent ones": (
        "11.3",
        """
def best_sizes(counts, k):
    present = [n for n, steps in counts.items() if steps]
    largest = max(present)
    others = sorted((n for n in present if n != largest), key=lambda n: -counts[n])
    return sorted([largest, *others[: k - 1]])
""",
        "rows are computed",
    ),
    "one after the other, the best at each time": (
        "11.3",
        """
def best_sizes(counts, k):
    present = [n for n, steps in counts.items() if steps]
    def rows(sizes):
        return sum(counts[n] * min(s for s in sizes if s >= n) for n in present)
    sizes = [max(present)]
    while len(sizes) < min(k, len(present)):
        sizes.append(min((n for n in present if n not in sizes), key=lambda n: rows([*sizes, n])))
    return sorted(sizes)
""",
        "rows are computed",
    ),
    "the most decodes have no size": (
        "11.3",
        """
def best_sizes(counts, k):
    return sorted(sorted(counts, key=lambda n: -counts[n])[:k])
""",
        "some steps have .* decodes, but your sizes are",
    ),
}
