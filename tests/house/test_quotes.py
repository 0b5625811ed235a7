"""What the chapters quote of the code stands there.

A ```py block is a quote from a source file: the same lines, comments too, moved to the left. A line of "..." stands for
lines that are left out. A ```diff block of chapter 01 is a part of the difference between two rungs of the ladder.

Run: pytest tests/house/test_quotes.py [-k scheduler]
"""

import difflib
import re
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTE = re.compile(r"^ *```py\n(.*?)^ *```\n", re.MULTILINE | re.DOTALL)
CHAPTERS = [*sorted((ROOT / "tutorials").glob("[0-9]*.md")), ROOT / "README.md"]
SOURCES = [
    *ROOT.glob("nanovllm/**/*.py"),
    *ROOT.glob("tutorials/**/*.py"),
    ROOT / "bench.py",
    ROOT / "example.py",
]


def is_quoted(lines: list[str], source: str) -> bool:
    """Whether these lines stand in the source, all moved by one indentation. "..." stays in the first line's block."""
    special = {"": "\n", "...": r"(?:\1.*\n|\n)*?"}
    pattern = "".join(special.get(line.strip(), rf"\1{re.escape(line)}\n") for line in lines)
    return re.search("^( *)" + pattern.removeprefix(r"\1"), source, re.MULTILINE) is not None


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_quotes_are_exact(chapter):
    sources = [path.read_text(encoding="utf-8") for path in SOURCES]
    for match in QUOTE.finditer(chapter.read_text(encoding="utf-8")):
        lines = textwrap.dedent(match[1]).splitlines()
        for i, line in enumerate(lines):
            if not any(is_quoted(lines[: i + 1], source) for source in sources):
                pytest.fail(
                    f"{chapter.name} quotes\n{match[1]}but no source goes on with\n{line}",
                    pytrace=False,
                )


DIFF = re.compile(r"^```diff\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def stands_in(lines: list[str], diff: list[str]) -> bool:
    """Whether a diff has these removed lines in this order, and these added and common ones, too.

    "..." stands for lines that are left out.
    """
    for is_of_kind in (lambda line: line[:1] != "+", lambda line: line[:1] != "-"):
        wanted = [line for line in lines if is_of_kind(line)]
        if any(line[:1] in "+-" for line in wanted if line != "..."):
            parts = ["(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in wanted]
            text = "".join(f"{line}\n" for line in diff if is_of_kind(line))
            if not re.search("^" + "".join(parts), text, re.MULTILINE):
                return False
    return True


def test_differences_between_rungs_are_exact():
    """Each diff of chapter 01 is a part of the difference between one rung and the next."""
    ladder = ROOT / "tutorials" / "ladder"
    rungs = [(ladder / f"rung{i}.py").read_text(encoding="utf-8").splitlines() for i in range(1, 7)]
    diffs = [
        [line.rstrip() for line in difflib.unified_diff(*pair, n=100)] for pair in pairwise(rungs)
    ]
    shown = DIFF.findall((ROOT / "tutorials" / "01_ladder.md").read_text(encoding="utf-8"))
    assert len(shown) > 5
    for block in shown:
        assert any(stands_in(block.splitlines(), diff) for diff in diffs), block


def test_every_fence_is_of_a_kind_that_is_tested_or_needs_no_test():
    kinds = {"python", "python (exercise)", "py", "diff", "text", "text (varies)", "bash"}
    for chapter in CHAPTERS:
        found = set(re.findall(r"^ *```(.+)$", chapter.read_text(encoding="utf-8"), re.MULTILINE))
        solutions = {kind for kind in found if re.fullmatch(r"python \(solution \d\d\.\d\)", kind)}
        assert found - solutions <= kinds, chapter.name
