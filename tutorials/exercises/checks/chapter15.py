"""Checks of chapter 15: a prompt in pieces, what a pair says, the overlap at which two are equal."""

import math

from tutorials.exercises.checks.expect import expect, unchanged


def check_1(answers) -> None:
    for reading, computing, count, overlap, right in (
        (6.0, 24.0, 1, 1.0, 24.0),
        (6.0, 24.0, 1, 0.0, 30.0),
        (6.0, 24.0, 4, 1.0, 24.0),
        (6.0, 24.0, 4, 0.0, 48.0),
        (6.0, 24.0, 4, 0.5, 36.0),
        (6.0, 24.0, 8, 1.0, 48.0),
        (6.0, 24.0, 8, 0.25, 66.0),
        (2.0, 3.1, 4, 0.25, 10.325),
    ):
        said = answers.pieces(reading, computing, count, overlap)
        what = f"{reading:g} ms of reading, {computing:g} of computing, {count} pieces"
        text = f"{what}, overlap {overlap:g}: {right:g} ms, and pieces says {said}"
        expect(abs(said - right) < 1e-9, text)
    for reading, computing, right in (
        (6.0, 28.0, 5),
        (6.0, 24.0, 5),
        (5.0, 72.0, 15),
        (6.0, 3.0, 2),
    ):
        said = answers.longer_from(reading, computing)
        text = (
            f"{reading:g} ms of reading, {computing:g} of computing: longer from {right} pieces on"
        )
        expect(said == right, f"{text}, and longer_from says {said}")


# --- 15.2 ---
def check_2(answers) -> None:
    for name, turns, simulated, right in (
        ("all alike", [(1.0, 1.5), (1.0, 1.5), (1.0, 1.5)], (1.0, 1.2), "right"),
        ("the simulator has the other sign", [(1.0, 1.5)] * 3, (1.0, 0.9), "wrong"),
        ("a difference of 10 %, and a range of 20 %", [(1.0, 1.0), (1.0, 1.1), (1.0, 1.2)], (1.0, 0.8), "not clear"),
        ("a difference of 50 %, and a range of 25 %: just twice", [(1.0, 1.5), (1.0, 1.25), (1.0, 1.5)], (1.0, 1.3), "not clear"),
        ("a difference of 30 %, and a range of 20 %", [(1.0, 1.2), (1.0, 1.3), (1.0, 1.4)], (1.0, 1.3), "not clear"),
        ("50 % less, and a range of 10 %", [(1.0, 0.45), (1.0, 0.55), (1.0, 0.5)], (2.0, 1.9), "right"),
        ("50 % less, and it sees no difference", [(1.0, 0.45), (1.0, 0.55), (1.0, 0.5)], (2.0, 2.0), "wrong"),
        ("50 % less, and it says 5 % more", [(1.0, 0.45), (1.0, 0.55), (1.0, 0.5)], (2.0, 2.1), "wrong"),
        ("each turn is twice as slow as the one before, for both", [(1.0, 1.2), (2.0, 2.4), (4.0, 4.8)], (1.0, 1.1), "right"),
        ("one turn of five was disturbed", [(1.0, 1.3), (1.0, 1.32), (1.0, 1.3), (1.0, 1.31), (1.0, 0.7)], (1.0, 1.2), "not clear"),
        ("turns of 10, 10 and 15.5 %: the median is 10 %", [(1.0, 1.1), (1.0, 1.1), (1.0, 1.155)], (1.0, 1.2), "not clear"),
        ("turns of 10, 10, 18 and 18 %: the median is 14 %", [(1.0, 1.1), (1.0, 1.1), (1.0, 1.18), (1.0, 1.18)], (1.0, 1.2), "not clear"),
        ("milliseconds", [(0.004, 0.005), (0.004, 0.0051), (0.004, 0.005)], (0.003, 0.004), "right"),
    ):  # fmt: skip
        said = unchanged(answers.judge, turns, simulated)
        expect(said == right, f"{name}: {right!r}, and judge says {said!r}")


# --- 15.3 ---
class Ratio:
    """One that rises or falls, and counts its calls."""

    def __init__(self, at_0: float, at_1: float, bend: float = 1.0):
        self.at_0, self.at_1, self.bend = at_0, at_1, bend
        self.num_calls = 0

    def __call__(self, overlap: float) -> float:
        self.num_calls += 1
        expect(0 <= overlap <= 1, f"there is no machine with an overlap of {overlap}")
        return self.at_0 + (self.at_1 - self.at_0) * overlap**self.bend

    def tie(self) -> float | None:
        share = (1 - self.at_0) / (self.at_1 - self.at_0)
        return share ** (1 / self.bend) if 0 <= share <= 1 else None


def check_3(answers) -> None:
    for name, ratio in (
        ("1.2 with overlap 0, 0.8 with overlap 1", Ratio(1.2, 0.8)),
        ("it falls late", Ratio(1.16, 0.81, 4.0)),
        ("it falls at once", Ratio(1.16, 0.81, 0.3)),
        ("it rises from 0.9 to 1.4", Ratio(0.9, 1.4)),
        ("it rises late", Ratio(0.99, 1.8, 3.0)),
        ("a tie with overlap 0, then it falls", Ratio(1.0, 0.75)),
        ("a tie with overlap 0, then it rises", Ratio(1.0, 1.25)),
        ("it rises to a tie with overlap 1", Ratio(0.75, 1.0)),
        ("it falls to a tie with overlap 1", Ratio(1.25, 1.0)),
        ("the one is always better", Ratio(0.86, 0.61)),
        ("the other is always better", Ratio(1.12, 5.83)),
    ):
        said = answers.tie(lambda overlap, ratio=ratio: ratio(overlap))
        right = ratio.tie()
        if right is None:
            expect(said is None, f"{name}: there is no tie, and tie says {said}")
        else:
            is_near = said is not None and math.isfinite(said) and abs(said - right) <= 0.01
            expect(is_near, f"{name}: a tie at {right:.3f}, and tie says {said}")
        expect(ratio.num_calls <= 12, f"{name}: {ratio.num_calls} calls, at most 12 are allowed")
