"""The chapters tell the truth: their Python blocks run and print what stands below them.

A ```text block right after a ```python block is that block's output, where a line of "..." stands for any lines.
Output that differs between machines stands in a ```text block whose fence says (varies).
A check that needs what the reader has written is fenced as ```python (exercise) and not run. Quotes are tested in
tests/house/test_quotes.py.

Run: pytest tests/tutorials/test_chapters.py [-k scheduler]; with --slow what is folded, too
To write the present output into chapter 03, if it has changed and is right (without a number, into all of them):
PYTHONPATH=.:tests/tools python tests/tutorials/test_chapters.py 03
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from book import BLOCK, needs_of, pattern
from extras import needs

ROOT = Path(__file__).parents[2]
CHAPTERS = [*sorted((ROOT / "tutorials").glob("[0-9]*.md")), ROOT / "README.md"]


def is_solution(match: re.Match) -> bool:
    """Whether a block stands within <details>."""
    before = match.string[: match.start()]
    return before.count("<details>") > before.count("</details>")


def outputs(chapter: Path, with_solutions: bool = True):
    """Runs the blocks in one namespace; yields the match, the number and the output of each."""
    namespace = {"__name__": "__main__"}
    for i, match in enumerate(BLOCK.finditer(chapter.read_text(encoding="utf-8"))):
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
    needs_of(chapter.name[:2])
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)  # as for Python that is started there
    for match, i, printed in outputs(chapter, with_solutions=pytestconfig.getoption("--slow")):
        if match[2] is not None and not re.fullmatch(pattern(match[2]), printed):
            pytest.fail(
                f"{chapter.name}, block {i} prints\n{printed}\nbut the chapter says\n{match[2]}",
                pytrace=False,
            )


def test_jupytext_makes_a_notebook_that_runs():
    """As README says. Solutions are cells, too."""
    jupytext, nbclient = needs("jupytext"), needs("nbclient")
    notebook = jupytext.read(ROOT / "tutorials" / "03_scheduler.md")
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": ROOT}}).execute()
    printed = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert len(printed) > 5 and any(printed)


def refresh(chapter: Path) -> None:
    text = old = chapter.read_text(encoding="utf-8")
    for match, _, printed in outputs(chapter):
        if match[2] is not None and not re.fullmatch(pattern(match[2]), printed):
            text = text.replace(
                match[0], match[0].replace(f"```text\n{match[2]}```", f"```text\n{printed}\n```")
            )
    if text != old:
        chapter.write_text(text, encoding="utf-8")
        print("refreshed", chapter.relative_to(ROOT))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # as conftest.py does
    numbers = sys.argv[1:] or [path.name[:2] for path in CHAPTERS]
    for path in CHAPTERS:
        if path.name[:2] in numbers:
            refresh(path)
