"""The chapters tell the truth: their Python blocks run, and print what stands below them.

A ```text block right after a ```python block is that block's output, where a line of "..." stands for any lines.
Output that differs between machines stands in a ```text block whose fence says (varies).
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
CHAPTERS = [*sorted((ROOT / "tutorials").glob("[0-9]*.md")), ROOT / "README.md"]


def pattern(expected: str) -> str:
    lines = [re.escape(line.rstrip()) for line in expected.rstrip().splitlines()]
    return "\n".join(lines).replace(re.escape("...") + "\n", "(?:.*\n)*").replace("\n" + re.escape("..."), "(?:\n.*)*")


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_code_blocks_run_and_print_what_the_chapter_says(chapter, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": "__main__"}
    for i, match in enumerate(BLOCK.finditer(chapter.read_text())):
        code, expected = match.groups()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, f"{chapter.name}, block {i + 1}", "exec"), namespace)
        printed = "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
        if expected is not None and not re.fullmatch(pattern(expected), printed):
            pytest.fail(
                f"{chapter.name}, block {i + 1} prints\n{printed}\nbut the chapter says\n{expected}", pytrace=False
            )


def test_every_chapter_has_the_parts_that_a_chapter_has():
    parts = [
        "What you will understand",
        "The problem",
        "The idea",
        "The code",
        "Run it",
        "What vLLM does beyond this",
        "Exercises",
    ]
    for chapter in CHAPTERS[:-1]:
        headings = re.findall(r"^## (.*)$", chapter.read_text(), re.MULTILINE)
        assert [h for h in headings if h in parts] == parts, chapter.name


def test_the_pattern_of_expected_output():
    assert re.fullmatch(pattern("a (b)\n...\nd\n"), "a (b)\nx\ny\nd")
    assert re.fullmatch(pattern("a\n...\n"), "a\nb\nc")
    assert not re.fullmatch(pattern("a\nb\n"), "a\nc")
