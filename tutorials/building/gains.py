"""What a milestone brings: a number of the student's engine without it and with it, measured on this machine.

The student guesses the second number before `check` shows it. Each function imports from nanovllm
when it runs, so that it measures the student's package.
"""

from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple


def scheduler(prompts: list[list[int]], n: int = 1, seqs: int = 16, is_shared: bool = True) -> Any:
    """A scheduler with these requests."""
    from nanovllm.block_manager import BlockManager
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.scheduler import Scheduler
    from nanovllm.sequence import Request

    limits: Any = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=seqs, max_model_len=1000)
    made = Scheduler(limits, BlockManager(200, 16, is_shared))
    for i, prompt in enumerate(prompts):
        made.add(Request(f"{i}", None, prompt, SamplingParams(n=n, max_tokens=20), arrival=i))
    return made


def run(made: Any, most: int = 1000) -> int:
    """The number of steps until all requests have ended, or `most`. Each token is 7."""
    steps = 0
    while made.has_unfinished() and steps < most:
        schedule = made.schedule()
        made.update(schedule, [7] * len(schedule.sampled))
        steps += 1
    return steps


def blocks(prompts: int, n: int, is_shared: bool) -> int:
    """In use once each request has its first tokens."""
    made = scheduler([[5] * 64] * prompts, n, is_shared=is_shared)
    run(made, prompts + 2)
    return made.block_manager.num_used_blocks


def blocks_of_prompts() -> tuple[float, float]:
    from nanovllm.block_manager import BlockManager
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.sequence import Request

    used = []
    for is_shared in (False, True):
        manager = BlockManager(100, 16, is_shared)
        for i in range(8):
            request = Request(f"{i}", None, [*range(64), i], SamplingParams())
            seq = request.sequences[0]
            manager.take_prefix(seq)
            manager.allocate(seq, len(seq) - seq.num_computed_tokens)
            manager.cache_full_blocks(seq, len(seq))
        used.append(manager.num_used_blocks)
    return used[0], used[1]


def steps_of_requests() -> tuple[float, float]:
    prompts = [[i] * 9 for i in range(8)]
    return run(scheduler(prompts, seqs=1)), run(scheduler(prompts))


def slots_of_a_batch() -> tuple[float, float]:
    from nanovllm import LLM

    llm = LLM(num_blocks=50, device="cpu", attention_backend="torch")
    made = scheduler([[i] * length for i, length in enumerate((3, 5, 40))])
    schedule = made.schedule()
    made.update(schedule, [7] * 3)
    made.add(next(iter(scheduler([[9] * 40]).waiting)))
    items = (schedule := made.schedule()).items
    longest = max(item.num_tokens for item in items)
    return longest * len(items), len(llm.runner.prepare(schedule).input_ids)


def milliseconds_of_decodes() -> tuple[float, float]:
    import torch

    from nanovllm.backends import numba_ops, torch_ops
    from tutorials.measure.batches import random_batch

    batch, _ = random_batch([(1, 500)] * 8, 2, 64, num_blocks=1100)
    q = torch.randn(8, 8, 64)
    times = []
    for ops in (torch_ops, numba_ops):
        batch.layout = ops.layout(batch)
        ops.paged_attention(q, batch, 0, 0.125)  # compiles
        took = []
        for _ in range(9):
            start = perf_counter()
            ops.paged_attention(q, batch, 0, 0.125)
            took.append(1000 * (perf_counter() - start))
        times.append(min(took))
    return times[0], times[1]


def steps_of_generate() -> tuple[float, float]:
    return steps_of_llm(["12 + 30", "7 + 8"] * 4, {}, True), steps_of_llm(["12 + 30", "7 + 8"] * 4)


def steps_of_drafts() -> tuple[float, float]:
    prompts = [[5, 6, 7] * 8]
    return steps_of_llm(prompts), steps_of_llm(prompts, {"speculative_config": {}})


def steps_of_llm(prompts: list, options: dict | None = None, is_alone: bool = False) -> int:
    from nanovllm import LLM, SamplingParams

    llm = LLM(num_blocks=200, device="cpu", attention_backend="torch", **options or {})
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for part in [[prompt] for prompt in prompts] if is_alone else [prompts]:
        llm.generate(part, params, use_tqdm=False)
    return llm.stats()["steps"]


class Gain(NamedTuple):
    question: str
    without: str
    unit: str
    share: float  # the second number must be at most this share of the first
    measure: Callable[[], tuple[float, float]]

    def lines(self, before: float, after: float, guess: float | None) -> list[str]:
        """What a student reads. Before a guess, the second number stays hidden."""
        lines = [f"{self.question} {self.without}: {before:.4g} {self.unit}"]
        if guess is None:
            return [*lines, "guess the number with your code, and check again with --guess N"]
        said = f"with your code: {after:.4g} {self.unit}; your guess was {guess:.4g}"
        return [*lines, said if guess == after else f"{said}, {guess / after:.2g} times that"]


GAINS = {
    1: Gain("8 prompts with the same 64 tokens and one of their own, blocks of 16 tokens.", "without sharing", "blocks", 0.3, blocks_of_prompts),
    2: Gain("8 requests with prompts of 9 tokens and answers of 20; a step has at most 64 tokens.", "one after the other", "steps", 0.2, steps_of_requests),
    3: Gain("Three sequences decode, and a prompt of 40 tokens comes.", "with all rows as long as the longest", "tokens", 0.3, slots_of_a_batch),
    4: Gain("8 decodes over 500 tokens of context.", "with PyTorch's attention", "ms", 1.0, milliseconds_of_decodes),
    7: Gain("8 prompts and answers of 24 tokens.", "a call of generate for each", "steps", 0.2, steps_of_generate),
    8: Gain("4 samples of a prompt of 64 tokens, blocks of 16 tokens.", "as 4 requests without sharing", "blocks", 0.5, lambda: (blocks(4, 1, False), blocks(1, 4, False))),
    9: Gain("A greedy answer of 24 tokens to a text that repeats itself.", "without draft tokens", "steps", 0.8, steps_of_drafts),
}  # fmt: skip
