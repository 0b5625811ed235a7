"""Answers to the exercises of chapter 10 that must not pass: exercise, code, a part of what is said."""

from pathlib import Path

PROGRAMS = """
def programs(chunks):
    grid = [None] * {size}
    before = 0
    for seq, (queries, keys) in enumerate(chunks):
        for i, first in enumerate(range(0, queries, 8)):
            end = {end}
            grid[{place}] = (seq, first, {tiles})
        before += queries
    return grid
"""


def programs(**changes: str) -> str:
    parts = {
        "size": "(sum(queries for queries, _ in chunks) // 8 + len(chunks))",
        "end": "min(keys - queries + first + 8, keys)",
        "place": "before // 8 + seq + i",
        "tiles": "math.ceil(end / 16)",
    }
    return PROGRAMS.format(**parts | changes)


JOIN = """
def join(one, other):
    maximum = max(one[0], other[0])
    {first}
    a, b = 2 ** (one[0] - maximum), 2 ** (other[0] - maximum)
    result = [a * x + b * y for x, y in zip(one[2], other[2])]
    return maximum, a * one[1] + b * other[1], {result}
"""
BOTH_EMPTY = "if maximum == -math.inf: return one"

STUB = Path(__file__).parents[3] / "tutorials" / "exercises" / "chapter10.py"
KERNEL = "@triton.jit\ndef window_kernel(" + STUB.read_text().split("def causal_kernel(")[1]
KERNEL = KERNEL.partition("def windowed")[0].replace(
    "    TOKENS:", "    WINDOW: tl.constexpr,\n    TOKENS:"
)
LAUNCH = """
def windowed(out, queries, keys, values, window):
    grid = (triton.cdiv(len(queries), 16),)
    window_kernel[grid](out, queries, keys, values, len(queries), len(keys), window, 16, 16, 16)
"""
MASK = "is_visible = key[None, :] <= position[:, None]"
IN_WINDOW = MASK + "\n        is_visible &= key[None, :] > position[:, None] - WINDOW"
START = "range(0, end, KEYS)"
LATE = "range(tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS, end, KEYS)"
INF = 'tl.full([TOKENS], float("-inf"), tl.float32)'
FINITE = "tl.full([TOKENS], -1e30, tl.float32)"


def window(*changes: tuple[str, str]) -> str:
    code = KERNEL
    for old, new in changes:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code + LAUNCH


WRONG = {
    "all keys": ("10.1", programs(end="keys"), r"should be \[\(0, 0, 1\), "),
    "keys of the first query": (
        "10.1",
        programs(end="keys - queries + first + 1"),
        r"should be \[\(0, 0, 4\), ",
    ),
    "beyond the end": ("10.1", programs(end="keys - queries + first + 8"), "should be"),
    "rounded down": ("10.1", programs(tiles="end // 16"), "should be"),
    "idle ones at the end": (
        "10.1",
        programs().replace("grid[before // 8 + seq + i] = ", "grid[grid.index(None)] = "),
        r"programs\(\[\(8, 8\), \(8, 40\)\]\)",
    ),
    "as many as are needed": (
        "10.1",
        programs(
            size="sum(math.ceil(queries / 8) for queries, _ in chunks)",
            place="sum(math.ceil(q / 8) for q, _ in chunks[:seq]) + i",
        ),
        "should be .*None",
    ),
    "two empty parts": (
        "10.2",
        JOIN.format(first="pass", result="result"),
        "two empty parts: the total should be 0, and is nan",
    ),
    "divided already": (
        "10.2",
        JOIN.format(first=BOTH_EMPTY, result="[x / (a * one[1] + b * other[1]) for x in result]"),
        "the result should be",
    ),
    "nothing shrinks": (
        "10.2",
        JOIN.format(first=BOTH_EMPTY, result="result").replace("a, b = ", "a, b = 1, 1 #"),
        "2 and 5 keys: the total should be",
    ),
    "only the first shrinks": (
        "10.2",
        JOIN.format(first=BOTH_EMPTY, result="result").replace("2 ** (other[0] - maximum)", "1"),
        "keys.*: the total should be",
    ),
    "without a maximum": (
        "10.2",
        """
def join(one, other):
    a, b = 2 ** one[0], 2 ** other[0]
    return 0.0, a * one[1] + b * other[1], [a * x + b * y for x, y in zip(one[2], other[2])]
""",
        "the maximum should be|OverflowError",
    ),
    "the maximum is never below 0": (
        "10.2",
        """
def join(one, other):
    maximum = max(one[0], other[0], 0.0)
    a, b = 2 ** (one[0] - maximum), 2 ** (other[0] - maximum)
    result = [a * x + b * y for x, y in zip(one[2], other[2])]
    return maximum, a * one[1] + b * other[1], result
""",
        "scores of -10,000: the|the maximum should be",
    ),
    "a part without keys is refused": (
        "10.2",
        JOIN.format(first="if -math.inf in (one[0], other[0]): return EMPTY", result="result"),
        "nothing and 3 keys: the maximum should be",
    ),
    "NaN in a tile that begins late": (
        "10.3",
        window((MASK, IN_WINDOW), (START, LATE)),
        "16 queries, 38 keys, a window of 10: NaN in rows",
    ),
    "NaN becomes 0": (
        "10.3",
        window((MASK, IN_WINDOW), (START, LATE))
        + "\nfirst = windowed\ndef windowed(out, *args):\n    first(out, *args)\n    out.nan_to_num_(0)\n",
        "a number is wrong",
    ),
    "all keys are read": (
        "10.3",
        window((MASK, IN_WINDOW), (INF, FINITE)),
        "1 queries, 40 keys, a window of 10: program 0 reads 40 keys, and 24 are enough",
    ),
    "one key too many": (
        "10.3",
        window((MASK, IN_WINDOW.replace(">", ">=")), (START, LATE), (INF, FINITE)),
        "a window of 10: a number is wrong",
    ),
    "the window of the last query": (
        "10.3",
        window((MASK, IN_WINDOW), (START, LATE.replace("first -", "end - 1 -")), (INF, FINITE)),
        "a number is wrong|NaN",
    ),
    "no window in the mask": (
        "10.3",
        window((START, LATE), (INF, FINITE)),
        "a number is wrong",
    ),
}
