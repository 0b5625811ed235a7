"""The pictures: every one that a chapter shows is there, and its script still draws it.

Run: pytest tests/tutorials/test_figures.py
"""

import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.tools.extras import needs

ROOT = Path(__file__).parents[2]
CHAPTERS = [*(ROOT / "tutorials").glob("[0-9]*.md"), ROOT / "README.md"]


def test_pictures_and_chapters_belong_together():
    shown = {
        (chapter.parent / link).resolve()
        for chapter in CHAPTERS
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", chapter.read_text())
    }
    drawn = set((ROOT / "tutorials" / "figures").resolve().glob("*.png"))
    assert shown - drawn == set(), "a picture is missing"
    results = {path.stem for path in (ROOT / "tutorials" / "results").glob("*.json")}
    assert {path.stem for path in drawn - shown} <= results, "a picture that nobody shows"


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize(
    "name",
    [
        "plot_blocks",
        "plot_memory",
        "plot_bench",
        "plot_roofline",
        "plot_policies",
        "plot_serving",
        "plot_replicas",
        "plot_vattention",
    ],
)
def test_scripts_draw_what_is_committed(name, monkeypatch, tmp_path):
    needs("matplotlib")
    module = importlib.import_module(f"tutorials.figures.{name}")
    committed = module.HERE
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    module.main()
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn and all((committed / file).exists() for file in drawn)
