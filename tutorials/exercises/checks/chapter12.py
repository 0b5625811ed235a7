"""Checks of chapter 12: what users wait for, an honest benchmark, tokens that cost no time."""

import random

from nanovllm.topics.simulator.cost_model import HARDWARE, SHAPES, Hardware, shape_of
from tutorials.exercises.checks.expect import Wrong, expect, unchanged


def check_1(answers) -> None:
    cases = {
        "one request": ([(0.0, [0.5, 0.6, 0.7])], (0.5, 0.1)),
        "it came after 2 s": ([(2.0, [2.53, 2.64, 2.75])], (0.53, 0.11)),
        "answers of 3, 2 and 5 tokens": (
            [(0.0, [1.0, 1.5, 2.0]), (1.0, [1.2, 1.3]), (3.0, [3.3, 3.5, 3.7, 3.9, 4.1])],
            (0.3, 0.2),
        ),
        "pauses of 1, 1 and 7 s": ([(0.0, [1.0, 2.0, 3.0, 10.0])], (1.0, 3.0)),
        "one of four has a single token": (
            [(0.0, [1.0]), (0.0, [2.0, 2.2]), (0.0, [3.0, 3.4]), (0.0, [9.0, 9.6])],
            (2.5, 0.4),
        ),
    }
    for name, (requests, wanted) in cases.items():
        said = unchanged(answers.waits, requests)
        for kind, number, right in zip(("TTFT", "TPOT"), said, wanted):
            close = number is not None and abs(number - right) < 1e-9
            expect(close, f"{name}: the median {kind} is {right:g} s, and waits says {number}")


# --- 12.2 ---

READING, COMPUTING = 0.01, 0.001  # seconds: of a step, of a token


class Engine:
    """An engine with a clock of its own. Its first two runs are slow, it has a prefix cache, its
    answers end early, and one later run is disturbed."""

    def __init__(self, disturbed: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.known: set[tuple[int, ...]] = set()  # first blocks of prompts
        self.calls: list[tuple[int, bool, int]] = []  # prompts that hit, ignore_eos, max_tokens
        self.disturbed = disturbed
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def generate(self, prompts, max_tokens, ignore_eos=False) -> list[int]:
        if not all(0 <= token < self.vocab_size for prompt in prompts for token in prompt):
            raise Wrong(f"token ids must be below {self.vocab_size}")
        keys = [tuple(prompt) for prompt in prompts]
        missing = [key for key in keys if key[:4] not in self.known]
        self.calls.append((len(keys) - len(missing), ignore_eos, max_tokens))
        self.known.update(key[:4] for key in keys)
        lengths = [max_tokens] * len(keys)
        if not ignore_eos:
            lengths = [max(1, max_tokens - sum(key) % 4) for key in keys]
        work = sum(map(len, missing)) + sum(lengths)
        slow = 3.0 if len(self.calls) <= 2 else 1.0
        slow *= 1.5 if len(self.calls) == self.disturbed else 1.0
        self.time += slow * (READING * max(lengths) + COMPUTING * work)
        return lengths


def check_2(answers) -> None:
    rng = random.Random(12)
    for count, size, max_tokens, rounds in ((4, 40, 8, 3), (8, 100, 16, 5), (2, 10, 64, 3)):
        prompts = [[rng.randrange(250 * count) for _ in range(size)] for _ in range(count)]
        engine = Engine(rng.randint(3, 2 + rounds), 250 * count)
        said = answers.speed(engine, [prompt[:] for prompt in prompts], max_tokens, rounds)
        num_hits, all_long, asked = zip(*engine.calls) if engine.calls else ((), (), ())
        expect(len(engine.calls) == rounds + 2, f"{len(engine.calls)} runs, and not {rounds + 2}")
        text = f"{sum(num_hits)} of {count * len(engine.calls)} prompts were in the prefix cache"
        expect(sum(num_hits) == 0, text)
        expect(all(all_long), "answers ended early: ignore_eos was not asked for")
        expect(set(asked) == {max_tokens}, f"max_tokens was {asked}, and not {max_tokens}")
        tokens = count * max_tokens
        right = tokens / (READING * max_tokens + COMPUTING * (count * size + tokens))
        text = f"the median of {rounds} rounds is {right:.1f} tokens/s, and speed says {said}"
        expect(abs(said - right) < 1e-6 * right, text)


# --- 12.3 ---
def check_3(answers) -> None:
    thread = Hardware("one thread of a CPU", 2.34e9, 70.7e9, 24e9)
    small = shape_of(SHAPES["qwen3-0.6b"], 2)
    gqa = shape_of(SHAPES["qwen2.5-7b"], 2)
    h100, a100 = HARDWARE["h100"], HARDWARE["a100"]
    for shape, hardware, decodes, context, right in (
        (small, h100, 1, 1000, 445),
        (small, h100, 256, 1000, 5843),
        (small, h100, 256, 100, 989),
        (small, h100, 1024, 8000, 45_521),
        (small, a100, 16, 1000, 488),
        (gqa, h100, 64, 1000, 330),
        (gqa, a100, 256, 1000, 52),
        (gqa, a100, 256, 100, 0),
        (small, thread, 64, 100, 0),
        (small, h100, 0, 0, 306),
    ):
        said = answers.free_tokens(shape, hardware, decodes, context)
        what = f"{decodes} decodes with a context of {context} on {hardware.name}"
        text = f"{shape.layers} layers, {what}: {right} tokens are free, and you say {said}"
        expect(said == right, text)
