"""Checks of chapter 23: bytes of requests, a step of the delta rule, slots."""

import random

import torch

from nanovllm.topics.hybrid.delta import decode
from tutorials.exercises.checks.expect import expect, unchanged

LINEAR, FULL = "linear_attention", "full_attention"


def check_1(answers) -> None:
    cases = {
        "attention in all of 4 layers, blocks that are full": (2000, 32, [FULL] * 4, 2, 50, 7),
        "a length that fills no block": (1000, 33, [FULL] * 4, 1, 50, 5),
        "states in 3 of 4 layers": (1060, 32, [LINEAR] * 3 + [FULL], 1, 50, 5),
        "less room than the slot of padding takes": (100, 16, [LINEAR] * 3 + [FULL], 1, 50, 0),
        "states only": (500, 10**6, [LINEAR], 1, 40, 11),
    }
    for case, (*given, right) in cases.items():
        said = unchanged(answers.how_many_fit, *given)
        expect(said == right, f"{case}: {right} requests fit, but how_many_fit says {said}")


def check_2(answers) -> None:
    generator = torch.Generator().manual_seed(0)
    for decay, beta, keys in ((1.0, 1.0, 3), (0.5, 1.0, 3), (1.0, 0.25, 5), (0.7, 0.6, 2)):
        state = torch.randn(keys, 4, generator=generator)
        q, k = torch.nn.functional.normalize(torch.randn(2, keys, generator=generator))
        v = torch.randn(4, generator=generator)
        states = state.clone()[None, None]
        rows = torch.cat([q, k, v])[None]
        gates = torch.tensor([[decay]]).log(), torch.tensor([[beta]])
        out = decode(rows, *gates, (1, keys), states, torch.tensor([0]), torch.tensor([False]))
        given = [x.tolist() for x in (state, q, k, v)]
        said, new = unchanged(answers.delta_step, *given, decay, beta)
        case = f"decay {decay}, beta {beta}"
        right = states[0, 0].tolist()
        same = torch.allclose(torch.tensor(new, dtype=torch.float32), states[0, 0], atol=1e-4)
        expect(same, f"{case}: the new state should be {right}, but it is {new}")
        wanted = (out[0, 0] * keys**0.5).tolist()  # the engine scales queries
        close = all(abs(a - b) < 1e-4 for a, b in zip(said, wanted, strict=True))
        expect(close, f"{case}: the query should read {wanted}, but it reads {said}")


def check_3(answers) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        num_slots = rng.randint(1, 4)
        slots = answers.Slots(num_slots)
        held: dict[int, str] = {}  # what each slot holds
        texts: dict[str, str] = {}  # what each sequence has written
        for name in map(str, range(60)):
            action = rng.choice(["new", "fork", "write", "write", "free"])
            if action in ("new", "fork") and len(texts) == num_slots:
                action = "free"
            if action == "new" or not texts:
                texts[name] = ""
                if rng.random() < 0.8:  # the others fork or end before they write
                    write(slots, name, texts, held, num_slots)
                continue
            other = rng.choice([*texts])
            if action == "free":
                slots.free(other)
                del texts[other]
            elif action == "fork":
                slots.fork(other, name)
                texts[name] = texts[other]
            else:
                write(slots, other, texts, held, num_slots)


def write(slots, name: str, texts: dict, held: dict, num_slots: int) -> None:
    source, target = slots.write(name)
    expect(
        target in range(1, num_slots + 1), f"there are {num_slots} slots, but write says {target}"
    )
    before = held.get(source, "") if texts[name] else ""
    expect(before == texts[name], f"{name} has written {texts[name]!r}, but reads {before!r}")
    shared = [
        other for other, text in texts.items() if other != name and text == texts[name] and text
    ]
    expect(
        source == target or shared, f"{name} shares its slot with no one: write must copy nothing"
    )
    texts[name] += f"{name},"
    held[target] = texts[name]
