"""Requests whose first steps and decodes are small enough to be recorded: on a GPU they are replayed.

Tests import this file. An example that does: pytest tests/device/test_cuda_graphs.py -k recordings
"""

import random

MAX_TOKENS = 12
# first steps with so few prompts that a recording has room for them
RECORDED = {"dtype": "float32", "num_blocks": 500, "max_num_seqs": 24, "max_num_batched_tokens": 64}


def prompts_of_all_lengths() -> list[list[int]]:
    """Around the ends of blocks; some begin with the same tokens."""
    rng = random.Random(0)
    stem = [rng.randrange(160) for _ in range(64)]
    prompts = [
        [rng.randrange(160) for _ in range(n)] for n in (1, 2, 7, 15, 16, 17, 31, 33, 65, 130)
    ]
    prompts += [[*stem[:n], rng.randrange(160)] for n in (15, 16, 17, 48, 63)]
    return [*prompts, stem]
