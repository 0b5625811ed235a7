"""The pictures: each that a chapter shows is there and can be read, and its script still draws it, or README says where
the script is.

Run: pytest tests/tutorials/test_figures.py [-k NAME]
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools.extras import needs

ROOT = Path(__file__).parents[2]
CHAPTERS = [*(ROOT / "tutorials").glob("[0-9]*.md"), ROOT / "README.md"]
FIGURES = (ROOT / "tutorials" / "figures").resolve()


def names() -> list[str]:
    """Of all pictures, if they can be drawn here."""
    if find_spec("matplotlib") is None:  # an extra
        return []
    from tutorials.figures.__main__ import figures

    return sorted(figures())


def test_pictures_and_chapters_belong_together():
    shown = {
        (chapter.parent / link).resolve()
        for chapter in CHAPTERS
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", chapter.read_text(encoding="utf-8"))
    }
    drawn = set(FIGURES.glob("*.png"))
    assert shown - drawn == set(), "a picture is missing"
    results = {path.stem for path in (ROOT / "tutorials" / "results").glob("*.json")}
    assert {path.stem for path in drawn - shown} <= results, "a picture that no page shows"


def test_a_picture_has_a_script_or_is_frozen():
    readme = (FIGURES / "README.md").read_text(encoding="utf-8")
    drawn = {path.stem for path in FIGURES.glob("*.png")}
    needs("matplotlib")
    assert drawn == {*names(), *re.findall(r"`(\w+)`", readme)}


@pytest.mark.parametrize("name", names())
def test_a_picture_can_be_read(name):
    from tests.tools.pictures import faults
    from tutorials.figures.__main__ import figures

    figure = figures()[name]()
    assert faults(figure) == []
    check_committed(FIGURES / f"{name}.png", figure)


def check_committed(path: Path, figure) -> None:
    """The file has the size and the texts of what is drawn now."""
    from PIL import Image  # matplotlib needs it, too

    from tutorials.figures.style import words

    image = Image.open(path)
    assert image.size == figure.canvas.get_width_height()
    figure.draw_without_rendering()
    assert image.text["Description"] == words(figure), f"python -m tutorials.figures {path.stem}"
    assert path.stat().st_size < 150_000
