"""Your answers to the exercises of chapter 23. To check them: python -m tutorials.check 23"""


# --- 23.1 ---
def how_many_fit(
    room: int, length: int, kinds: list[str], token_bytes: int, state_bytes: int
) -> int:
    """How many requests of `length` tokens fit into `room` bytes at the same time. `kinds` has for each
    layer "full_attention" or "linear_attention". `token_bytes` is what one token takes in one layer with
    attention, and `state_bytes` what one request takes in one layer with states. Blocks have 16 tokens,
    and one more slot is for padding."""
    raise NotImplementedError


# --- 23.2 ---
def delta_step(
    state: list[list[float]],
    q: list[float],
    k: list[float],
    v: list[float],
    decay: float,
    beta: float,
) -> tuple[list[float], list[list[float]]]:
    """One token of the gated delta rule: what the query reads, and the new state. The state has a row
    for each number of a key, and a column for each number of a value. `q` and `k` have length 1."""
    raise NotImplementedError


# --- 23.3 ---
class Slots:
    """Hands out the slots 1 to num_slots. There are never more sequences than slots."""

    def __init__(self, num_slots: int):
        raise NotImplementedError

    def fork(self, parent: str, child: str) -> None:
        """The new sequence `child` begins with the state of `parent`, which may not have written yet."""
        raise NotImplementedError

    def write(self, name: str) -> tuple[int, int]:
        """A step will write the state of this sequence, which may be new. Returns the slot to read,
        and the slot to write, which no other sequence has. They are the same where nothing must be
        copied, also for a new sequence."""
        raise NotImplementedError

    def free(self, name: str) -> None:
        """The sequence has ended. It may not have written."""
        raise NotImplementedError
