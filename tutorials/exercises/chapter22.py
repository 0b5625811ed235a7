"""Your answers to the exercises of chapter 22. To check them: python -m tutorials.check 22"""

# --- 22.1 ---


def tokens_of_a_step(right: float, k: int) -> float:
    """The mean number of tokens that a step brings with `k` guesses, each right with this
    probability."""
    raise NotImplementedError


# --- 22.2 ---


def best_k(right: float, num_seqs: int, fixed: float, per_row: float, most: int) -> int:
    """How many guesses, from 0 to `most`, give the most tokens per second.

    A step takes `fixed` seconds, and `per_row` for each row: those of the sequences, and those of
    their guesses.
    """
    raise NotImplementedError


# --- 22.3 ---


def checked(guess: int, p: list[float], q: list[float], u: float, v: float) -> int:
    """The guess, which was drawn with the probabilities q, or another token instead of it, so that
    tokens come with the probabilities p. `u` and `v` are random numbers, at least 0 and below 1."""
    raise NotImplementedError
