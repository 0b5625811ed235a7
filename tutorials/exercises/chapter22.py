"""Your answers to the exercises of chapter 22. To check them: python -m tutorials.check 22"""


# --- 22.1 ---
def rows_to_check(counts: list[int], num_draft_tokens: list[int]) -> list[int]:
    """Which rows of the batch go to the head: of each sequence, that of its last token, and those
    of its draft tokens. Sequence b computes counts[b] tokens in this step, up to its end, and the
    last num_draft_tokens[b] of them are draft tokens; it may have none. The rows of the first
    sequence come first."""
    raise NotImplementedError


def new_tokens(drafts: list[list[int]], likeliest: list[int]) -> list[list[int]]:
    """Which tokens each sequence gets: the accepted ones of its draft, and one of the model's own.
    `likeliest` has the model's next token for each of the rows above."""
    raise NotImplementedError


# --- 22.2 ---
def best_k(right: float, num_seqs: int, fixed: float, per_row: float, most: int) -> int:
    """How many draft tokens, from 0 to `most`, give the most tokens per second.

    A step takes `fixed` seconds, and `per_row` for each row: those of the sequences, and those of
    their draft tokens.
    """
    raise NotImplementedError


# --- 22.3 ---
def checked(draft_token: int, p: list[float], q: list[float], u: float, v: float) -> int:
    """The draft token, which was drawn with the probabilities q, or another token instead of it, so
    that tokens come with the probabilities p. `u` and `v` are random numbers, at least 0 and below 1."""
    raise NotImplementedError
