"""Checks of chapter 22: draft tokens that a step checks, how many, another rule."""

import random

import torch

from nanovllm import LLM, SamplingParams
from tutorials.exercises.checks.chapter07 import plan_of
from tutorials.exercises.checks.expect import expect, unchanged


def check_1(answers) -> None:
    cases = {
        "one sequence, no draft": ([1], [[]], [7], [0], [[7]]),
        "two draft tokens, both right": ([3], [[5, 6]], [5, 6, 7], [0, 1, 2], [[5, 6, 7]]),
        "two draft tokens, the second is wrong": ([3], [[5, 9]], [5, 6, 7], [0, 1, 2], [[5, 6]]),
        "two draft tokens, the first is wrong": ([3], [[9, 6]], [5, 6, 7], [0, 1, 2], [[5]]),
        "all 4 right": ([5], [[5, 6, 7, 8]], [5, 6, 7, 8, 9], [*range(5)], [[5, 6, 7, 8, 9]]),
        "a wrong one behind the same token": ([3], [[5, 9]], [5, 5, 1], [0, 1, 2], [[5, 5]]),
        "a right one, token 0": ([2], [[0]], [0, 4], [0, 1], [[0, 4]]),
        "a prompt of 4 tokens, then a sequence with one draft token": (
            [4, 2],
            [[], [8]],
            [3, 8, 9],
            [3, 4, 5],
            [[3], [8, 9]],
        ),
        "the last 2 of 5 tokens are draft tokens, then a decode": (
            [5, 1],
            [[4, 4], []],
            [4, 2, 4, 1],
            [2, 3, 4, 5],
            [[4, 2], [1]],
        ),
    }
    for case, (counts, drafts, likeliest, rows, tokens) in cases.items():
        said = list(unchanged(answers.rows_to_check, counts, [len(draft) for draft in drafts]))
        expect(said == rows, f"{case}: the rows should be {rows}, but you say {said}")
        got = [list(one) for one in unchanged(answers.new_tokens, drafts, likeliest)]
        expect(got == tokens, f"{case}: the new tokens should be {tokens}, but you say {got}")
    check_drafts_with_the_model(answers)


def check_drafts_with_the_model(answers) -> None:
    """With any drafts, the answers are as of the model alone."""
    llm = LLM(block_size=4, num_blocks=64, dtype="float32", device="cpu")
    prompts = [llm.tokenizer.encode(text) for text in ("Once upon a time", "There was a king who")]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    truth = [output.outputs[0].token_ids for output in outputs]
    rng = random.Random(0)
    gained: list[list[int]] = [[], []]
    for _ in range(6):
        drafts = []
        for right, so_far in zip(truth, gained):
            draft = right[len(so_far) : len(so_far) + rng.randint(0, 3)]
            drafts.append([t if rng.random() < 0.7 else t + 1 for t in draft])
        parts, counts = [], []
        for i, (prompt, so_far, draft) in enumerate(zip(prompts, gained, drafts)):
            token_ids = [*prompt, *so_far, *draft]
            parts.append((token_ids, 0, len(token_ids), list(range(16 * i, 16 * i + 16))))
            counts.append(len(token_ids))
        with torch.inference_mode():
            hidden, _ = llm.runner.forward(llm.runner.prepare(plan_of(*parts)))
            rows = answers.rows_to_check(counts, [len(draft) for draft in drafts])
            likeliest = llm.runner.model.lm_head(hidden[list(rows)]).argmax(-1).tolist()
        for so_far, tokens in zip(gained, answers.new_tokens(drafts, likeliest)):
            so_far += tokens
    for so_far, right in zip(gained, truth):
        num = min(len(so_far), len(right))
        said = f"the embedded model alone answers {right[:num]}, but with drafts {so_far[:num]}"
        expect(so_far[:num] == right[:num], said)


def check_2(answers) -> None:
    cases = [(0.8, n, 1.0, 0.01, 8) for n in (1, 8, 64, 512)]
    cases += [(0.0, 1, 1.0, 0.01, 4), (1.0, 4, 1.0, 0.01, 40), (1.0, 4, 0.0, 1.0, 5)]
    cases += [(0.5, 2, 1.0, 0.2, 0), (0.3, 1, 5000.0, 500.0, 6)]
    for right, num_seqs, fixed, per_row, most in cases:
        speeds = []
        for k in range(most + 1):
            tokens = sum(right**i for i in range(k + 1)) * num_seqs
            speeds.append(tokens / (fixed + per_row * num_seqs * (k + 1)))
        best = next(k for k, speed in enumerate(speeds) if speed >= max(speeds) * (1 - 1e-12))
        said = answers.best_k(right, num_seqs, fixed, per_row, most)
        case = f"{num_seqs} sequences, right {right}, {fixed} s and {per_row} s a row"
        expect(said == best, f"{case}: {best} of {most} draft tokens, but best_k says {said}")


def check_3(answers) -> None:
    rng = random.Random(0)
    cases = [([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), ([0.1, 0.9], [0.9, 0.1]), ([0.4, 0.6], [0.4, 0.6])]
    cases += [([0.25, 0.25, 0.5], [1.0, 0.0, 0.0]), ([0.0, 0.0, 1.0], [0.5, 0.25, 0.25])]
    for p, q in cases:
        found = [0.0] * len(p)
        num_kept, num_draws = 0, 20_000
        for i in range(num_draws):
            draft_token = rng.choices(range(len(q)), q)[0]
            v = (i + rng.random()) / num_draws
            token = unchanged(answers.checked, draft_token, p, q, rng.random(), v)
            expect(token in range(len(p)), f"{token!r} is no token from 0 to {len(p) - 1}")
            found[token] += 1 / num_draws
            num_kept += token == draft_token
        shares = ", ".join(f"{share:.2f}" for share in found)
        is_right = all(abs(a - b) < 0.02 for a, b in zip(found, p))
        expect(is_right, f"p={p}, q={q}: tokens come with {shares}")
        most = sum(map(min, p, q))
        share = num_kept / num_draws
        sentence = f"p={p}, q={q}: {share:.2f} of the draft tokens are accepted, not {most:.2f}"
        expect(share > most - 0.02, sentence)
    judge_numbers(answers)


def judge_numbers(answers) -> None:
    """It is `u` and `v` that decide, and no other random numbers."""
    p, q = [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]
    cases = [(p, q, u, v) for u in (0.1, 0.24, 0.26, 0.9) for v in (0.1, 0.3, 0.4, 0.9)]
    cases.append(([0.0, 0.1, 0.2, 0.7], [1.0, 0.0, 0.0, 0.0], 0.5, 1 - 2**-53))  # sums round
    for p, q, u, v in cases:
        right = 0 if u < p[0] else 1 if v < 1 / 3 else len(p) - 1
        said = answers.checked(0, p, q, u, v)
        case = f"p={p}, q={q}, draft token 0, u={u}, v={v}"
        expect(said == right, f"{case}: token {right}, but checked says {said}")
    judge_edges(answers)


def judge_edges(answers) -> None:
    """A token with probability 0 never comes, and there is a token for each number."""
    rng, cases = random.Random(1), [([0.0, 0.0, 1.0], 0.5, 0.0), ([0.0, 0.0, 1.0], 0.0, 0.5)]
    for _ in range(2000):
        weights = [rng.random() for _ in range(rng.randint(3, 12))]
        cases.append(([0.0, *(w / sum(weights) for w in weights), 0.0], 0.5, 1 - 2**-53))
    for p, u, v in cases:
        said = answers.checked(0, p, [1.0] + [0.0] * (len(p) - 1), u, v)
        case = f"p={p}, q=[1.0, 0.0, ...], draft token 0, u={u}, v={v}"
        is_right = said in range(len(p)) and p[said] > 0
        expect(is_right, f"{case}: a token with a probability above 0, but checked says {said}")
