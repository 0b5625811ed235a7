"""Checks of chapter 22: tokens of a step, how many guesses, another rule."""

import random
from math import isclose

from tutorials.exercises.checks.expect import expect


def check_1(answers) -> None:
    for right in (0.5, 0.0, 1.0, 0.9):
        for k in (2, 0, 1, 7):
            outcomes = [(i + 1, right**i * (1 - right)) for i in range(k)] + [(k + 1, right**k)]
            mean = sum(tokens * share for tokens, share in outcomes)
            said = answers.tokens_of_a_step(right, k)
            case = f"{k} guesses, each right with probability {right}"
            expect(isclose(said, mean), f"{case}: {mean:.4f} tokens, but you say {said:.4f}")


def check_2(answers) -> None:
    cases = [(0.8, n, 1.0, 0.01, 8) for n in (1, 8, 64, 512)]
    cases += [(0.0, 1, 1.0, 0.01, 4), (1.0, 4, 1.0, 0.01, 16), (1.0, 4, 0.0, 1.0, 5)]
    cases += [(0.5, 2, 1.0, 0.2, 0), (0.3, 1, 5.0, 0.5, 6)]
    for right, num_seqs, fixed, per_row, most in cases:
        speeds = []
        for k in range(most + 1):
            tokens = sum(right**i for i in range(k + 1)) * num_seqs
            speeds.append(tokens / (fixed + per_row * num_seqs * (k + 1)))
        best = next(k for k, speed in enumerate(speeds) if speed >= max(speeds) * (1 - 1e-12))
        said = answers.best_k(right, num_seqs, fixed, per_row, most)
        case = f"{num_seqs} sequences, right {right}, {fixed} s and {per_row} s a row"
        expect(said == best, f"{case}: {best} of {most} guesses, but best_k says {said}")


def check_3(answers) -> None:
    rng = random.Random(0)
    cases = [([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), ([0.1, 0.9], [0.9, 0.1]), ([0.4, 0.6], [0.4, 0.6])]
    cases += [([0.25, 0.25, 0.5], [1.0, 0.0, 0.0]), ([0.0, 0.0, 1.0], [0.5, 0.25, 0.25])]
    for p, q in cases:
        found = [0.0] * len(p)
        num_kept, num_draws = 0, 20_000
        for i in range(num_draws):
            guess = rng.choices(range(len(q)), q)[0]
            token = answers.checked(guess, [*p], [*q], rng.random(), (i + rng.random()) / num_draws)
            expect(token in range(len(p)), f"{token!r} is no token from 0 to {len(p) - 1}")
            found[token] += 1 / num_draws
            num_kept += token == guess
        shares = ", ".join(f"{share:.2f}" for share in found)
        is_right = all(abs(a - b) < 0.02 for a, b in zip(found, p))
        expect(is_right, f"p={p}, q={q}: tokens come with {shares}")
        most = sum(map(min, p, q))
        sentence = (
            f"p={p}, q={q}: {num_kept / num_draws:.2f} of the guesses are kept, not {most:.2f}"
        )
        expect(num_kept / num_draws > most - 0.02, sentence)
    judge_numbers(answers)


def judge_numbers(answers) -> None:
    """It is `u` and `v` that decide, and no other random numbers."""
    p, q = [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]
    for u in (0.1, 0.24, 0.26, 0.9):
        for v in (0.1, 0.3, 0.4, 0.9):
            right = 0 if u < 0.25 else 1 if v < 1 / 3 else 2
            said = answers.checked(0, [*p], [*q], u, v)
            case = f"p={p}, q={q}, guess 0, u={u}, v={v}"
            expect(said == right, f"{case}: token {right}, but checked says {said}")
