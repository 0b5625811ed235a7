"""Checks of chapter 07: arrays by hand, tables as a rectangle, guesses that a step checks."""

import random
import sys
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from nanovllm import LLM, SamplingParams
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from tutorials.exercises.checks.expect import expect


def plan_of(*parts: tuple[list[int], int, int, list[int]]) -> Schedule:
    """Token ids, start, number of tokens and block table of each sequence."""
    schedule = Schedule()
    for token_ids, start, num_tokens, block_table in parts:
        params = SamplingParams(temperature=0)
        (seq,) = Request("r", None, token_ids, params).sequences
        seq.block_table = block_table
        schedule.add(Item(seq, start, num_tokens))
    return schedule


def check_1(answers) -> None:
    runner = LLM(block_size=4, num_blocks=64, device="cpu").runner
    cases = [(9, 6, 2, [5, 2, 8]), (9, 6, 3, [5, 2, 8]), (10, 0, 4, [3, 1, 0]), (1, 0, 1, [9])]
    cases += [(8, 7, 1, [4, 0]), (12, 4, 8, [1, 0, 2]), (14, 5, 3, [6, 1, 7, 0])]
    cases += [(9, 4, 1, [5, 2, 8]), (3, 0, 1, [2])]  # chunks of one token, in the middle
    for length, start, num_tokens, table in cases:
        inputs = runner.prepare(plan_of((list(range(length)), start, num_tokens, table)))
        right = {
            "the positions": inputs.positions.tolist(),
            "the slots": inputs.batch.slot_mapping.tolist(),
            "the context": int(inputs.batch.context_lens[0]),
            "whether a row is sampled": len(inputs.sampled_rows) > 0,
        }
        said = answers.arrays(list(range(length)), start, num_tokens, table, 4)
        case = f"{num_tokens} of {length} tokens from {start} on, table {table}"
        expect(len(said) == 4, f"{case}: four results are wanted, but there are {len(said)}")
        for (name, value), one in zip(right.items(), said):
            one = list(one) if isinstance(value, list) else one
            expect(one == value, f"{case}: {name} should be {value}, but you say {one}")


def num_operations(call: Callable[[], object]) -> int:
    """How many operations of Python a call takes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Touched(TorchFunctionMode):
    """Counts the numbers that leave their tensors and become Python's."""

    NAMES = ("tolist", "item", "__int__", "__index__", "unbind", "numpy", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.NAMES:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def ragged(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables with so many blocks: all of them, and where each begins."""
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *counts]).cumsum(0)
    return blocks.int(), ends.int()


def check_2(answers) -> None:
    for counts in ([2, 3, 1], [1, 1], [4], [2, 0, 5], [0, 3], [3, 0]):
        blocks, ends = ragged(counts)
        wanted = [
            [*blocks[begin:end].tolist(), *[-1] * (max(counts) - (end - begin))]
            for begin, end in zip(ends.tolist(), ends.tolist()[1:])
        ]
        said = answers.rectangle(blocks.clone(), ends.clone())
        case = f"block_tables {blocks.tolist()}, cu_blocks {ends.tolist()}"
        expect(
            isinstance(said, torch.Tensor),
            f"{case}: a tensor is wanted, but it is a {type(said).__name__}",
        )
        found = said.tolist()
        expect(found == wanted, f"{case}: it should be {wanted}, but is {found}")
    few, many = ragged([5, 4, 3]), ragged([500, 400, 300])
    more = num_operations(lambda: answers.rectangle(*many))
    more -= num_operations(lambda: answers.rectangle(*few))
    each = "more than for 12: it touches each block"
    expect(more < 300, f"for 1,200 blocks, Python runs {more:,} operations {each}")
    more = num_touched(answers, *many) - num_touched(answers, *few)
    expect(more < 300, f"for 1,200 blocks, {more:,} numbers become Python's, {each}")
    kind = answers.rectangle(*few).dtype
    expect(kind == torch.int32, f"the rectangle should be torch.int32, but is {kind}")


def num_touched(answers, block_tables: torch.Tensor, cu_blocks: torch.Tensor) -> int:
    with Touched() as touched:
        answers.rectangle(block_tables, cu_blocks)
    return touched.count


def check_3(answers) -> None:
    cases = {
        "one sequence, no guess": ([1], [[]], [7], [0], [[7]]),
        "two guesses, both right": ([3], [[5, 6]], [5, 6, 7], [0, 1, 2], [[5, 6, 7]]),
        "two guesses, the second is wrong": ([3], [[5, 9]], [5, 6, 7], [0, 1, 2], [[5, 6]]),
        "two guesses, the first is wrong": ([3], [[9, 6]], [5, 6, 7], [0, 1, 2], [[5]]),
        "a prompt of 4 tokens, then a sequence with one guess": (
            [4, 2],
            [[], [8]],
            [3, 8, 9],
            [3, 4, 5],
            [[3], [8, 9]],
        ),
        "the last 2 of 5 tokens are guesses, then a decode": (
            [5, 1],
            [[4, 4], []],
            [4, 2, 4, 1],
            [2, 3, 4, 5],
            [[4, 2], [1]],
        ),
    }
    for case, (counts, guesses, likeliest, rows, tokens) in cases.items():
        said = list(answers.rows_to_check(counts, [len(guess) for guess in guesses]))
        expect(said == rows, f"{case}: the rows should be {rows}, but you say {said}")
        got = [list(one) for one in answers.new_tokens(guesses, likeliest)]
        expect(got == tokens, f"{case}: the new tokens should be {tokens}, but you say {got}")
    check_guesses_with_the_model(answers)


def check_guesses_with_the_model(answers) -> None:
    """With any guesses, the answers are as of the model alone."""
    llm = LLM(block_size=4, num_blocks=64, dtype="float32", device="cpu")
    prompts = [llm.tokenizer.encode(text) for text in ("Once upon a time", "There was a king who")]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    truth = [output.outputs[0].token_ids for output in outputs]
    rng = random.Random(0)
    gained: list[list[int]] = [[], []]
    for _ in range(6):
        guesses = []
        for right, so_far in zip(truth, gained):
            guess = right[len(so_far) : len(so_far) + rng.randint(0, 3)]
            guesses.append([t if rng.random() < 0.7 else t + 1 for t in guess])
        parts, counts = [], []
        for i, (prompt, so_far, guess) in enumerate(zip(prompts, gained, guesses)):
            token_ids = [*prompt, *so_far, *guess]
            parts.append((token_ids, 0, len(token_ids), list(range(16 * i, 16 * i + 16))))
            counts.append(len(token_ids))
        with torch.inference_mode():
            hidden, _ = llm.runner.forward(llm.runner.prepare(plan_of(*parts)))
            rows = answers.rows_to_check(counts, [len(guess) for guess in guesses])
            likeliest = llm.runner.model.lm_head(hidden[list(rows)]).argmax(-1).tolist()
        for so_far, tokens in zip(gained, answers.new_tokens(guesses, likeliest)):
            so_far += tokens
    for so_far, right in zip(gained, truth):
        num = min(len(so_far), len(right))
        said = f"the embedded model alone answers {right[:num]}, but with guesses {so_far[:num]}"
        expect(so_far[:num] == right[:num], said)
