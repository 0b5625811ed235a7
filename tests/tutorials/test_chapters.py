"""The chapters tell the truth: their Python blocks run and print what stands below them, and their quotes are exact.

A ```text block right after a ```python block is that block's output, where a line of "..." stands for any lines.
Output that differs between machines stands in a ```text block whose fence says (varies).
A ```py block is a quote from a source file: the same lines, comments too, moved to the left. A line of "..." stands for
lines that are left out. A check that needs what the reader has written is fenced as ```python (exercise) and not run.

Run: pytest tests/tutorials/test_chapters.py [-k scheduler]; with --slow the solutions of chapters 14 to 20, too
To write the present output into the chapters, if it has changed and is right: python tests/tutorials/test_chapters.py
"""

import contextlib
import difflib
import io
import os
import re
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from book import needs_the_interpreter

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"^ *```py\n(.*?)^ *```\n", re.MULTILINE | re.DOTALL)
CHAPTERS = [*sorted((ROOT / "tutorials").glob("[0-9]*.md")), ROOT / "README.md"]
SOURCES = [
    *ROOT.glob("nanovllm/**/*.py"),
    *ROOT.glob("tutorials/**/*.py"),
    ROOT / "bench.py",
    ROOT / "example.py",
]


def pattern(expected: str) -> str:
    lines = [re.escape(line.rstrip()) for line in expected.rstrip().splitlines()]
    return (
        "\n".join(lines)
        .replace(re.escape("...") + "\n", "(?:.*\n)*")
        .replace("\n" + re.escape("..."), "(?:\n.*)*")
    )


def is_solution(match: re.Match) -> bool:
    """Whether a block stands within <details>."""
    before = match.string[: match.start()]
    return before.count("<details>") > before.count("</details>")


def outputs(chapter: Path, with_solutions: bool = True):
    """Runs the blocks in one namespace; yields the match, the number and the output of each."""
    namespace = {"__name__": "__main__"}
    for i, match in enumerate(BLOCK.finditer(chapter.read_text())):
        if is_solution(match) and not with_solutions:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(match[1], f"{chapter.name}, block {i + 1}", "exec"), namespace)
        yield (
            match,
            i + 1,
            "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()),
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the chapters show what a CPU prints")
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_code_blocks_run_and_print_what_the_chapter_says(chapter, monkeypatch, pytestconfig):
    needs_the_interpreter(chapter.name[:2])
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)  # as for whoever runs Python there
    for match, i, printed in outputs(chapter, with_solutions=pytestconfig.getoption("--slow")):
        if match[2] is not None and not re.fullmatch(pattern(match[2]), printed):
            pytest.fail(
                f"{chapter.name}, block {i} prints\n{printed}\nbut the chapter says\n{match[2]}",
                pytrace=False,
            )


def is_quoted(lines: list[str], source: str) -> bool:
    """Whether these lines stand in the source, all moved by one indentation. "..." stays in the first line's block."""
    special = {"": "\n", "...": r"(?:\1.*\n|\n)*?"}
    pattern = "".join(special.get(line.strip(), rf"\1{re.escape(line)}\n") for line in lines)
    return re.search("^( *)" + pattern.removeprefix(r"\1"), source, re.MULTILINE) is not None


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_quotes_are_exact(chapter):
    sources = [path.read_text() for path in SOURCES]
    for match in QUOTE.finditer(chapter.read_text()):
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
    rungs = [(ladder / f"rung{i}.py").read_text().splitlines() for i in range(1, 7)]
    diffs = [
        [line.rstrip() for line in difflib.unified_diff(*pair, n=100)] for pair in pairwise(rungs)
    ]
    shown = DIFF.findall((ROOT / "tutorials" / "01_ladder.md").read_text())
    assert len(shown) > 5
    for block in shown:
        assert any(stands_in(block.splitlines(), diff) for diff in diffs), block


def test_what_stands_in_a_difference():
    diff = [" a", "-b", "+c", " d", "+e"]
    for good in (["-b", "+c"], [" a", "+c", " d"], [" a", "...", "+e"], ["+c", "-b"]):
        assert stands_in(good, diff)
    for bad in (["-c"], [" a", "+e"], ["+e", "+c"], ["-a"]):
        assert not stands_in(bad, diff)


def test_what_is_a_quote():
    source = "def f(x):\n    if x:\n        y = 1\n\n        return y  # why\n    return x\n"
    for quote in (
        "if x:\n    y = 1\n\n    return y  # why",
        "y = 1\n...\nreturn y  # why",
        "if x:\n...\nreturn x",
    ):
        assert is_quoted(quote.split("\n"), source)
    for wrong in (
        "if x:\n    return y  # why",
        "y = 1\n\nreturn y",
        "y = 1\n...\nreturn x",
        "if x:\ny = 1",
        "x = 2",
    ):
        assert not is_quoted(wrong.split("\n"), source)


def test_every_fence_is_of_a_kind_that_is_tested_or_needs_no_test():
    kinds = {"python", "python (exercise)", "py", "diff", "text", "text (varies)", "bash"}
    for chapter in CHAPTERS:
        found = set(re.findall(r"^ *```(.+)$", chapter.read_text(), re.MULTILINE))
        solutions = {kind for kind in found if re.fullmatch(r"python \(solution \d\d\.\d\)", kind)}
        assert found - solutions <= kinds, chapter.name


def test_the_pattern_of_expected_output():
    assert re.fullmatch(pattern("a (b)\n...\nd\n"), "a (b)\nx\ny\nd")
    assert re.fullmatch(pattern("a\n...\n"), "a\nb\nc")
    assert not re.fullmatch(pattern("a\nb\n"), "a\nc")


def refresh(chapter: Path) -> None:
    text = old = chapter.read_text()
    for match, _, printed in outputs(chapter):
        if match[2] is not None and not re.fullmatch(pattern(match[2]), printed):
            text = text.replace(
                match[0], match[0].replace(f"```text\n{match[2]}```", f"```text\n{printed}\n```")
            )
    if text != old:
        chapter.write_text(text)
        print("refreshed", chapter.relative_to(ROOT))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as conftest.py does
    for path in CHAPTERS:
        refresh(path)
