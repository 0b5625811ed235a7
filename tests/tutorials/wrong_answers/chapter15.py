"""Answers to the exercises of chapter 15 that must not pass: exercise, code, a part of what is said."""

PIECES = """
def pieces(reading, computing, count, overlap):
    part = {part}
    longer, shorter = max({reading}, part), min({reading}, part)
    return {times} * (longer + {shown} * shorter)
"""


def pieces(**changes: str) -> str:
    parts = {
        "part": "computing / count",
        "reading": "reading",
        "times": "count",
        "shown": "(1 - overlap)",
    }
    return PIECES.format(**parts | changes)


JUDGE = """
def judge(turns, simulated):
    found = {found}
    middle, spread = {middle}, {spread}
    if {unclear}:
        return "not clear"
    says = {says}
    return "right" if (says > 0) == (middle > 0) else "wrong"
"""


def judge(**changes: str) -> str:
    parts = {
        "found": "[b / a - 1 for a, b in turns]",
        "middle": "median(found)",
        "spread": "max(found) - min(found)",
        "unclear": "abs(middle) <= 2 * spread",
        "says": "simulated[1] - simulated[0]",
    }
    return JUDGE.format(**parts | changes)


TIE = """
def tie(ratio):
    low, high = {low}, {high}
    at_low = ratio(low)
    if {none}:
        return None
    while {goes_on}:
        middle = (low + high) / 2
        if {beyond}:
            high = middle
        else:
            low = middle
    return (low + high) / 2
"""


def tie(**changes: str) -> str:
    parts = {
        "low": "0.0",
        "high": "1.0",
        "none": "(at_low > 1) == (ratio(high) > 1)",
        "goes_on": "high - low > 0.015",
        "beyond": "(ratio(middle) > 1) != (at_low > 1)",
    }
    return TIE.format(**parts | changes)


WRONG = {
    "the weights are read once": (
        "15.1",
        pieces(reading="reading / count"),
        "4 pieces, overlap 0: 48 ms, and pieces says 30",
    ),
    "each piece computes the whole prompt": (
        "15.1",
        pieces(part="computing"),
        "4 pieces, overlap 1: 24 ms, and pieces says 96",
    ),
    "overlap 0 hides all": (
        "15.1",
        pieces(shown="overlap"),
        "1 pieces, overlap 1: 24 ms, and pieces says 30",
    ),
    "one step only": ("15.1", pieces(times="1"), "4 pieces, overlap 1: 24 ms, and pieces says 6"),
    "reading is the shorter one": (
        "15.1",
        """
def pieces(reading, computing, count, overlap):
    return computing + count * (1 - overlap) * reading
""",
        "8 pieces, overlap 1: 48 ms, and pieces says 24",
    ),
    "the sign alone": ("15.2", judge(unclear="False"), "and a range of 20 %: 'not clear'"),
    "once the range": (
        "15.2",
        judge(unclear="abs(middle) <= spread"),
        "a difference of 30 %, and a range of 20 %: 'not clear', and judge says 'right'",
    ),
    "less is never clear": (
        "15.2",
        judge(unclear="middle <= 2 * spread"),
        "50 % less, and a range of 10 %: 'right'",
    ),
    "seconds": (
        "15.2",
        judge(found="[b - a for a, b in turns]"),
        "each turn is twice as slow as the one before, for both: 'right'",
    ),
    "the policies apart": (
        "15.2",
        judge(
            found="[b for a, b in turns]",
            middle="median(found) / median([a for a, b in turns]) - 1",
        ),
        "each turn is twice as slow as the one before, for both: 'right'",
    ),
    "the mean of the turns": (
        "15.2",
        judge(middle="sum(found) / len(found)"),
        "the median is 10 %: 'not clear', and judge says 'right'",
    ),
    "half of the turns": (
        "15.2",
        judge(
            spread="sorted(found)[-2] - sorted(found)[1] if len(found) > 3 else max(found) - min(found)"
        ),
        "one turn of five was disturbed: 'not clear'",
    ),
    "the size must agree": (
        "15.2",
        judge(
            says="simulated[1] / simulated[0] - 1 - middle + (middle if abs(middle) < 0.3 else 0)"
        ),
        "all alike: 'right', and judge says 'wrong'",
    ),
    "it always falls": (
        "15.3",
        tie(beyond="ratio(middle) < 1"),
        "it rises from 0.9 to 1.4: a tie at 0.200",
    ),
    "there is always a tie": ("15.3", tie(none="False"), "there is no tie"),
    "too rough": ("15.3", tie(goes_on="high - low > 0.2"), "a tie at "),
    "never wrong, but slow": (
        "15.3",
        tie(goes_on="high - low > 1e-9"),
        "calls, at most 12 are allowed",
    ),
    "a straight line": (
        "15.3",
        """
def tie(ratio):
    a, b = ratio(0), ratio(1)
    return None if (a > 1) == (b > 1) else (1 - a) / (b - a)
""",
        "it falls late: a tie at",
    ),
    "beyond all machines": ("15.3", tie(low="-1.0"), "there is no machine with an overlap of -1.0"),
}
