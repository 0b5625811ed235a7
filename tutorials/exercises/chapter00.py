"""Your answers to the exercises of chapter 00. To check them: python -m tutorials.check 00"""


# --- 00.1 ---
def tokens_computed(prompts: list[int], answers: list[int]) -> tuple[int, int]:
    """How many tokens are computed for prompts and answers of these lengths: by rung 1, which
    computes everything again for each token, and with a KV cache."""
    raise NotImplementedError


# --- 00.2 ---
def how_many_fit(
    memory: int, weights: int, per_token: int, requests: list[tuple[int, int]], longest: int
) -> tuple[int, int]:
    """How many of the first requests fit into `memory` bytes at the same time: with room for
    `longest` tokens for each, and with the room that each needs. A request is the lengths of its
    prompt and of its answer, and none needs room for more than `longest`. The first one that does
    not fit ends the count. If not even the weights fit, both are 0."""
    raise NotImplementedError


# --- 00.3 ---
def num_steps(answers: list[int], seats: int) -> int:
    """Steps until all answers of these lengths are complete, if at most `seats` requests take
    part in a step."""
    raise NotImplementedError
