"""Checks of chapter 13: blocks of samples, beams that differ, the copies of a step."""

import random
from unittest.mock import patch

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Request, Sequence
from tutorials.exercises.checks.expect import Wrong, expect, unchanged


def samples_of(manager: BlockManager, prompt: int, n: int, ahead: int = 0) -> list[Sequence]:
    """They have forked, and have not written a token of their own. The first one has blocks for so
    many tokens ahead."""
    request = Request("r", None, [*range(prompt)], SamplingParams(n=n))
    first, *others = request.sequences
    manager.allocate(first, prompt + ahead)
    first.num_computed_tokens = prompt
    for other in others:
        manager.fork(first, other)
    return request.sequences


def write(manager: BlockManager, seqs: list[Sequence]) -> None:
    """A next token for each."""
    for seq in seqs:
        seq.token_ids.append(0)
        manager.allocate(seq, 1)
        seq.num_computed_tokens += 1


def blocks_held(prompt: int, answer: int, n: int, block_size: int) -> int:
    """What a block manager says."""
    manager = BlockManager(200, block_size, enable_prefix_caching=False)
    samples = samples_of(manager, prompt, n)
    for _ in range(answer - 1):
        write(manager, samples)
    return manager.num_used_blocks


def check_1(answers) -> None:
    cases = [(500, 20, 8, 16), (6, 4, 3, 4), (8, 2, 3, 4), (8, 5, 3, 4), (8, 6, 3, 4), (3, 3, 4, 4)]
    cases += [(6, 2, 1, 4), (7, 2, 5, 4), (7, 3, 5, 4), (33, 16, 2, 16), (5, 9, 2, 1)]
    for prompt, answer, n, block_size in cases:
        held = blocks_held(prompt, answer, n, block_size)
        said = answers.blocks_at_most(prompt, answer, n, block_size)
        case = f"a prompt of {prompt}, {n} samples of {answer}, blocks of {block_size}"
        expect(said == held, f"{case}: {held} blocks are held at most, but you say {said}")


def check_2(answers) -> None:
    rng = random.Random(0)
    of_one = [answers.Candidate(0, token, -1 - 0.1 * token) for token in range(4)]
    of_other = [answers.Candidate(1, token, -2 - 0.1 * token) for token in range(4)]
    cases = [([*of_one, *of_other], 3, gamma) for gamma in (0.0, 0.3, 0.8, 10.0)]
    for _ in range(300):
        many = [
            answers.Candidate(parent, token, rng.uniform(-5, 0))
            for parent in range(3)
            for token in range(6)
        ]
        rng.shuffle(many)
        cases.append((many, rng.randint(1, 5), rng.uniform(0, 2)))
    for candidates, width, gamma in cases:
        values = {}
        for one in candidates:
            siblings = [c for c in candidates if c.parent == one.parent]
            values[one] = one.logprob - gamma * sum(c.logprob > one.logprob for c in siblings)
        best = sorted(candidates, key=lambda one: -values[one])[:width]
        found = unchanged(answers.diverse, candidates, width, gamma)
        names = [(c.parent, c.token) for c in found]
        wanted = [(c.parent, c.token) for c in best]
        case = f"width {width}, gamma {gamma:.1f}"
        expect(names == wanted, f"{case}: (parent, token) are {names}, but should be {wanted}")
        for one in found:
            text = f"a candidate has changed: its logprob is {one.logprob:.2f}"
            expect(one in candidates, text)


def three_samples(
    prompt: int, num_writers: int = 3, ahead: int = 0
) -> tuple[BlockManager, list[Sequence]]:
    manager = BlockManager(8, 4, enable_prefix_caching=False)
    return manager, samples_of(manager, prompt, 3, ahead)[:num_writers]


def step_of(rng: random.Random) -> tuple[BlockManager, list[Sequence]]:
    """A few requests whose samples have written different numbers of tokens; some of them write."""
    manager = BlockManager(200, rng.choice((2, 4)), enable_prefix_caching=False)
    writers = []
    for _ in range(rng.randint(1, 3)):
        samples = samples_of(manager, rng.randint(1, 9), rng.randint(1, 5), rng.choice([0, 7]))
        for _ in range(rng.randint(0, 6)):
            write(manager, rng.sample(samples, rng.randint(0, len(samples))))
        writers += rng.sample(samples, rng.randint(1, len(samples)))
    manager.take_moves()
    return manager, writers


def refuse(*args):
    raise Wrong("it asks num_new_blocks: count them yourself")


def check_3(answers) -> None:
    rng = random.Random(0)
    cases = {
        "three samples of a prompt of 6 tokens write": three_samples(6),
        "three samples of a prompt of 8 tokens write": three_samples(8),
        "two of three samples of a prompt of 6 tokens write": three_samples(6, 2),
        "one of three samples of a prompt of 6 tokens writes": three_samples(6, 1),
        "one of three samples writes, which has a block ahead": three_samples(6, 1, 4),
        "one of three samples writes, which has a block for it": three_samples(8, 1, 1),
    }
    cases |= {f"some samples of some requests write ({i})": step_of(rng) for i in range(100)}
    for case, (manager, seqs) in cases.items():
        free = [*manager.free_blocks]
        tables = [[*seq.block_table] for seq in seqs]
        with patch.object(BlockManager, "num_new_blocks", refuse):
            said = answers.blocks_needed(manager, seqs)
        same = free == [*manager.free_blocks] and tables == [seq.block_table for seq in seqs]
        expect(same and not manager.moves, "blocks_needed has changed the blocks; it may only look")
        for seq in seqs:
            manager.allocate(seq, 1)
        taken = len(free) - manager.num_free_blocks
        expect(said == taken, f"{case}: that takes {taken} free blocks, but you say {said}")
