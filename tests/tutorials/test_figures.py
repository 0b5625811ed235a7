"""The pictures: a page shows each, and README names the commit of the program that drew it.

Run: pytest tests/tutorials/test_figures.py [-k NAME]
"""

import re
import subprocess
from shutil import which

import pytest
from book import CHAPTERS, FIGURES, ROOT, TUTORIALS

README = (FIGURES / "README.md").read_text(encoding="utf-8")


def test_pictures_and_chapters_belong_together():
    shown = {
        (chapter.parent / link).resolve()
        for chapter in [*CHAPTERS, ROOT / "README.md"]
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", chapter.read_text(encoding="utf-8"))
    }
    drawn = set(FIGURES.resolve().glob("*.png"))
    assert shown - drawn == set(), "a picture is missing"
    results = {path.stem for path in (TUTORIALS / "results").glob("*.json")}
    assert {path.stem for path in drawn - shown} <= results, "a picture that no page shows"
    assert all(path.stat().st_size < 150_000 for path in drawn)


def test_each_picture_has_a_program_at_a_commit():
    rows = re.findall(r"^\| (.*) \| `(\w+\.py)` \| (\w+) \|$", README, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    photographs = ["page_live", "site_first", "site_lab"]
    assert sorted(names + photographs) == sorted(path.stem for path in FIGURES.glob("*.png"))
    git = ["git", "-C", str(ROOT), "cat-file", "-e"]
    for _, script, commit in rows:
        has_history = [*git, f"{commit}^{{commit}}"]
        if which("git") is None or subprocess.run(has_history, capture_output=True).returncode:
            pytest.skip("the history is not here")
        subprocess.run([*git, f"{commit}:tutorials/figures/{script}"], check=True)
