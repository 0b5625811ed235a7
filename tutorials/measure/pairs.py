"""Pairs of policies on identical jobs: does the simulator say which one is better?

For each pair, the real engine played the same jobs with both policies, in turns, several times. Then
both were simulated on the machine that was fitted to steps of other runs. What is compared is the
difference between the two policies: its sign, and its size. The measured times are in
tutorials/results/simulator_pairs*.json; tutorials/measure/README.md says which commit has the jobs.

A difference is *clear* if it is more than twice the range of what was measured: of the differences
in the single turns.
"""

from statistics import median

KEYS = [f"{name} {kind}" for name in ("TTFT", "gaps", "latency") for kind in ("mean", "p99")]
CLEAR = 2.0  # times the range of the real differences
# the pairs whose jobs came at 90 % of the capacity; the others had 50 to 70 %, or all at once
NEAR_CAPACITY = (
    "last first",
    "shortest first, guessed",
    "shortest prompt first",
    "earliest deadline",
    "pushes out",
)


def difference(one: dict[str, float], other: dict[str, float], key: str) -> float:
    return other[key] / one[key] - 1


def judged(row: dict, key: str) -> dict:
    """What a measure says of a pair. `row` has the numbers of both, real and simulated."""
    real = [difference(*turn, key) for turn in zip(row["real"][0], row["real"][1])]
    middle = median(real)
    spread = max(real) - min(real)
    guess = difference(*row["simulated"], key)
    return {
        "real": middle,
        "range": spread,
        "simulated": guess,
        "is_clear": abs(middle) > CLEAR * spread,
        "agrees": (guess > 0) == (middle > 0),
    }


def errors(row: dict, key: str) -> list[float]:
    """Of the simulation, relative to the median of the real runs; for both policies."""
    return [
        simulated[key] / median(one[key] for one in real) - 1
        for real, simulated in zip(row["real"], row["simulated"])
    ]
