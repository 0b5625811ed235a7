"""Your answers to the exercises of chapter 15. To check them: python -m tutorials.check 15"""

from collections.abc import Callable
from statistics import median


# --- 15.1 ---
def pieces(reading: float, computing: float, count: int, overlap: float) -> float:
    """Seconds until a prompt is computed in `count` equal pieces, one in each step.

    Each step reads all weights, which takes `reading` seconds. `computing` is what the products of
    the whole prompt take. Of the shorter one of the two, a step hides the part `overlap`.
    """
    raise NotImplementedError


def longer_from(reading: float, computing: float) -> int:
    """From how many pieces on, with an overlap of 1, a prompt takes longer than in one piece."""
    raise NotImplementedError


# --- 15.2 ---
def judge(turns: list[tuple[float, float]], simulated: tuple[float, float]) -> str:
    """What the real runs say of a simulation: "right", "wrong" or "not clear".

    A pair of numbers is what the usual policy has, and what the other one has. There is one for each
    turn. A difference is that of the other policy, as a share of the usual one's number. What was
    measured is the median of the turns; it is clear if it is more than twice their range.
    """
    raise NotImplementedError


# --- 15.3 ---
def tie(ratio: Callable[[float], float]) -> float | None:
    """The overlap at which two policies are equal, to within 0.01; None if the same one is better
    on all machines.

    `ratio(overlap)` simulates both, and returns the one's latency divided by the other's. It rises
    or falls with the overlap, all the way from 0 to 1. It is slow: call it at most 12 times.
    """
    raise NotImplementedError
