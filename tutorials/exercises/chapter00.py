"""Your answers to the exercises of chapter 00. To check them: python -m tutorials.check 00"""

# --- 00.1 ---


def tokens_computed(prompts: list[int], answers: list[int]) -> tuple[int, int]:
    """How many tokens are computed for prompts and answers of these lengths: by rung 1, which
    computes everything again for each token, and with a KV cache."""
    raise NotImplementedError


# --- 00.2 ---


def kv_bytes(config: dict, bytes_per_number: int) -> int:
    """Bytes in the KV cache per token, for a model with this config.json."""
    raise NotImplementedError


# --- 00.3 ---


def num_steps(answers: list[int], seats: int) -> int:
    """Steps until all answers of these lengths are complete, if at most so many requests take
    part in a step."""
    raise NotImplementedError
