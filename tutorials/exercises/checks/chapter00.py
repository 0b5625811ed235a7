"""Checks of chapter 00: tokens computed, requests that fit, steps with a number of seats."""

import random
from functools import cache

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import EMBEDDED_MODEL, Limits
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from tutorials.exercises.checks.expect import expect, unchanged
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.runs import Request as LadderRequest
from tutorials.ladder.runs import run_rung

FOUR = [(18, 6), (19, 4), (47, 3), (14, 5)]  # those of the chapter: 112 tokens in the cache
QWEN = (1_192_099_840, 114_688)  # Qwen3-0.6B: its weights, and a token in the cache


@cache
def tokens_of_rungs(*lengths: tuple[int, int]) -> tuple[int, int]:
    """What rungs 1 and 2 compute for requests of these lengths, in and out."""
    model = Qwen3(EMBEDDED_MODEL)
    requests = [LadderRequest([7] * prompt, output) for prompt, output in lengths]
    one, two = (run_rung(rung, model, requests) for rung in (1, 2))
    return sum(step.tokens for step in one.steps), sum(step.tokens for step in two.steps)


def check_1(answers) -> None:
    for prompts, outputs in (([18, 19, 47, 14], [6, 4, 3, 5]), ([7], [1]), ([5, 9], [1, 12])):
        counted = tokens_of_rungs(*zip(prompts, outputs))
        said = unchanged(answers.tokens_computed, prompts, outputs)
        what = f"prompts of {prompts} tokens and answers of {outputs}"
        same = isinstance(said, tuple | list) and (*said,) == counted
        expect(same, f"{what}: rungs 1 and 2 compute {counted} tokens, you say {said}")


def check_2(answers) -> None:
    cases = [
        ((112, 0, 1, FOUR, 56), (2, 4)),
        ((111, 0, 1, FOUR, 56), (1, 3)),
        ((300, 0, 1, FOUR, 50), (4, 4)),
        ((1000 + 9 * 200, 1000, 9, FOUR, 50), (4, 4)),
        ((1000 + 9 * 200 - 1, 1000, 9, FOUR, 50), (3, 4)),
        ((24 * 10**9, *QWEN, [(900, 101)] * 300, 40_960), (4, 198)),
        ((100, 0, 1, [(90, 2), (20, 2), (5, 2)], 91), (1, 1)),
        ((10**9, *QWEN, FOUR, 1000), (0, 0)),
        ((100, 0, 1, [], 50), (0, 0)),
    ]
    for (memory, weights, per_token, requests, longest), right in cases:
        said = unchanged(answers.how_many_fit, memory, weights, per_token, requests, longest)
        same = isinstance(said, tuple | list) and (*said,) == right
        some = requests if len(requests) < 5 else f"{len(requests)} of {requests[0]}"
        what = f"{memory:,} bytes, weights of {weights:,}, {per_token:,} per token"
        expect(same, f"{what}, requests {some}, longest={longest:,}: {right} fit, you say {said}")


def steps_of_the_scheduler(outputs: list[int], seats: int) -> int:
    """The real scheduler, with prompts of one token and no model."""
    limits = Limits(max_model_len=512, max_num_batched_tokens=512, max_num_seqs=seats)
    scheduler = Scheduler(limits, BlockManager(num_blocks=1000, block_size=16))
    for i, length in enumerate(outputs):
        request = Request(str(i), None, [i], SamplingParams(max_tokens=length, ignore_eos=True))
        request.arrival = i
        scheduler.add(request)
    num_steps = 0
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        scheduler.update(schedule, [7] * len(schedule.sampled))
        num_steps += 1
    return num_steps


def check_3(answers) -> None:
    rng = random.Random(0)
    loads = [([6, 4, 3, 5], 2), ([1, 1, 1], 8), ([9, 1, 1, 1], 2), ([1, 1, 1, 9], 2), ([], 3)]
    lengths = (rng.choices(range(1, 21), k=rng.randint(1, 40)) for _ in range(10))
    loads += [(length, rng.randint(1, 5)) for length in lengths]
    for outputs, seats in loads:
        counted = steps_of_the_scheduler(outputs, seats)
        said = unchanged(answers.num_steps, outputs, seats)
        sentence = f"answers of {outputs} tokens, {seats} seats: {counted} steps, you say {said}"
        expect(said == counted, sentence)
