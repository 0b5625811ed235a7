"""Checks of chapter 00: tokens computed, bytes per token, steps with a number of seats."""

import random
from functools import cache

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import EMBEDDED_MODEL, Limits
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from tutorials.exercises.checks.expect import expect
from tutorials.ladder.qwen3 import Qwen3
from tutorials.ladder.runs import Request as LadderRequest
from tutorials.ladder.runs import run_rung

CONFIGS = {  # and what a token takes in two bytes per number
    "Qwen3-0.6B": (
        dict(
            num_hidden_layers=28,
            hidden_size=1024,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        ),
        114_688,
    ),
    "Qwen2-0.5B": (
        dict(num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2),
        12_288,
    ),
    "OPT-13B": (dict(num_hidden_layers=40, hidden_size=5120, num_attention_heads=40), 819_200),
}


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
        said = answers.tokens_computed(prompts, outputs)
        what = f"prompts of {prompts} tokens and answers of {outputs}"
        same = isinstance(said, tuple | list) and (*said,) == counted
        expect(same, f"{what}: rungs 1 and 2 compute {counted} tokens, you say {said}")


def check_2(answers) -> None:
    for name, (config, expected) in CONFIGS.items():
        for size in (2, 4):
            said = answers.kv_bytes({**config}, size)
            right = expected * size // 2
            sentence = (
                f"{name}: {right:,} bytes per token at {size} bytes per number, you say {said}"
            )
            expect(said == right, sentence)


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
    loads = [([6, 4, 3, 5], 2), ([1, 1, 1], 8), ([9, 1, 1, 1], 2), ([1, 1, 1, 9], 2)]
    loads += [([rng.randint(1, 20) for _ in range(12)], rng.randint(1, 5)) for _ in range(10)]
    for outputs, seats in loads:
        counted = steps_of_the_scheduler(outputs, seats)
        said = answers.num_steps([*outputs], seats)
        sentence = f"answers of {outputs} tokens, {seats} seats: {counted} steps, you say {said}"
        expect(said == counted, sentence)
