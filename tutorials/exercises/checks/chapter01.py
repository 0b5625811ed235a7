"""Checks of chapter 01: a rectangle's tokens, a batch that shrinks, a budget that is shared."""

import random
from functools import cache
from itertools import pairwise
from types import ModuleType

import torch

from nanovllm.config import EMBEDDED_MODEL
from tutorials.exercises.checks.expect import Wrong, expect, unchanged
from tutorials.ladder import rung3, rung5, rung6
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.runs import Request, Step

FOUR = ((18, 6), (19, 4), (47, 3), (14, 5))  # tokens in and out
Lengths = tuple[tuple[int, int], ...]


def requests_of(lengths: Lengths) -> list[Request]:
    rng = random.Random(0)
    return [Request([rng.randrange(1500) for _ in range(n)], out) for n, out in lengths]


def run(generate, requests: list[Request]) -> tuple[list[Step], list[list[int]]]:
    """The steps that it reports, and the answers."""
    steps: list[Step] = []
    with torch.inference_mode():
        answers = generate(Qwen3(EMBEDDED_MODEL), requests, lambda *step: steps.append(Step(*step)))
    return steps, answers


@cache
def answers_of(rung: ModuleType, lengths: Lengths) -> list[list[int]]:
    """What a rung of the ladder answers."""
    _, right = run(rung.generate, requests_of(lengths))
    return right


def check_1(answers) -> None:
    for lengths in (FOUR, ((5, 1),), ((3, 2), (8, 9), (1, 4))):
        prompts, outputs = map(list, zip(*lengths))
        steps, _ = run(rung3.generate, requests_of(lengths))
        counted = sum(step.tokens for step in steps)
        said = unchanged(answers.cells, prompts, outputs)
        what = f"prompts of {prompts} and answers of {outputs} tokens"
        expect(said == counted, f"{what}: rung 3 computes {counted}, you say {said}")


def check_2(answers) -> None:
    lengths = (*FOUR, (5, 1), (6, 12), (9, 2), (4, 7), (11, 3), (3, 3))  # more than SEATS
    requests = requests_of(lengths)
    right = answers_of(rung3, lengths)
    try:
        steps, said = run(answers.generate, requests)
    except NotImplementedError:
        raise
    except RuntimeError as error:  # sizes that do not fit
        hint = "Has the cache lost the same rows as the batch?"
        raise Wrong(f"PyTorch says: {error}. {hint}") from error
    for i, (mine, theirs) in enumerate(zip(right, said, strict=True)):
        expect(mine == theirs, f"request {i}: rung 3 answers {mine}, yours {theirs}")
    most = max(len(step.requests) for step in steps)
    expect(most <= rung3.SEATS, f"{most} requests are in a step, and there are {rung3.SEATS} seats")
    steps, _ = run(answers.generate, requests_of(FOUR))
    counted = sum(step.tokens for step in steps)
    expect(counted == 202, f"the four requests: 202 tokens would do, yours computes {counted}")
    sizes = [len(step.requests) for step in steps]
    expect(sizes == [4, 4, 4, 3, 2, 1], f"requests in each step: {sizes}, not [4, 4, 4, 3, 2, 1]")
    longest = max(52, steps[0].held // 4)
    slots = [(step.held, step.used) for step in steps]
    right_slots = [(num * longest, used) for num, used in zip(sizes, (98, 102, 106, 60, 40, 23))]
    expect(slots == right_slots, f"slots held and used in each step: {slots}, not {right_slots}")


def check_3(answers) -> None:
    lengths = ((513, 4), (20, 9), (12, 3), (30, 6))
    requests = requests_of(lengths)
    right = answers_of(rung6, lengths)
    steps, said = run(with_plan(answers.plan), requests)
    expect(right == said, "the answers are not those of rung 6")
    most = max(step.tokens for step in steps)
    expect(most <= rung6.BUDGET, f"a step computes {most} tokens, the budget is {rung6.BUDGET}")
    first = dict(zip((len(request.prompt) for request in steps[0].requests), steps[0].sizes))
    for num_tokens, _ in lengths:
        what = f"the prompt of {num_tokens} tokens"
        begun = next(i for i, s in enumerate(steps, 1) if num_tokens in lengths_in(s))
        expect(begun == 1, f"{what} gets its first tokens in step {begun}, and step 1 has room")
        share = min(16, num_tokens)
        got = first[num_tokens]
        expect(got >= share, f"{what} gets {got} tokens in step 1, {share} are its share")
    done = [i for i, step in enumerate(steps, 1) if requests[0] in step.requests][-4]
    expect(done <= 10, f"the long prompt is complete in step {done}; in step 10 it can be")
    check_decodes(steps, requests)
    # four prompts run, and behind them an answer, which lacks one token
    expect(shares(answers.plan, [100] * 4 + [30], answering=4)[4] == 1, "an answer gets no token")
    two = shares(answers.plan, [200, 200])
    expect(two == [32, 32], f"two prompts of 200 tokens share 64 as {two}, and not by turns of 16")
    check_shares(answers.plan)
    check_admission(answers.plan)


def shares(plan, lengths: list[int], answering: int | None = None) -> list[int]:
    """What a plan gives to running sequences with these prompts, of which one has all but a token."""
    running = [rung5.Sequence(request) for request in requests_of(tuple((n, 5) for n in lengths))]
    for seq in running:
        seq.blocks = [0] * 100
    if answering is not None:
        running[answering].computed = lengths[answering] - 1
    plan(running, [], [])
    return [seq.new for seq in running]


def check_shares(plan) -> None:
    """The whole budget is used, 16 tokens in each turn."""
    for lengths in ([513, 20, 12, 30], [5, 100], [30, 20], [100] * 5):
        given = shares(plan, lengths)
        lacking = min(rung6.BUDGET, sum(lengths))
        what = f"prompts of {lengths} tokens get {given}: {sum(given)} tokens"
        expect(sum(given) == lacking, f"{what}, and {lacking} fit into the budget")
    three = shares(plan, [100] * 3)
    said = f"three prompts of 100 tokens get {three}"
    expect(three == [32, 16, 16], f"{said}; by turns of 16 it is [32, 16, 16]")


def check_admission(plan) -> None:
    """A new sequence needs a seat, and blocks for all its tokens."""
    for num_waiting, num_blocks, num_right, lack in (
        (12, 100, rung6.SEATS, f"there are {rung6.SEATS} seats"),
        (3, 5, 2, "each needs two blocks, and five are free"),
    ):
        waiting = [rung5.Sequence(request) for request in requests_of(((20, 5),) * num_waiting)]
        running: list[rung5.Sequence] = []
        plan(running, waiting, [*range(num_blocks)])
        what = f"{num_waiting} prompts of 20 tokens wait, and {len(running)} begin"
        expect(len(running) == num_right, f"{what}; {num_right} may, because {lack}")


def lengths_in(step: Step) -> list[int]:
    """Of the prompts that take part."""
    return [len(request.prompt) for request in step.requests]


def check_decodes(steps: list[Step], requests: list[Request]) -> None:
    """An answer that runs gets a token in each step until it is complete."""
    for request in requests:
        taking = [i for i, step in enumerate(steps, 1) if request in step.requests]
        answer = taking[-request.max_tokens :]
        gaps = [b - a for a, b in pairwise(answer)]
        n = len(request.prompt)
        text = f"the answer to the prompt of {n} tokens stands still: it is in steps {answer}"
        expect(all(gap == 1 for gap in gaps), text)


def with_plan(plan):
    """Rung 6 with another plan."""

    def generate(model, requests, report):
        old = rung6.plan
        rung6.plan = plan
        try:
            return rung6.generate(model, requests, report)
        finally:
            rung6.plan = old

    return generate
