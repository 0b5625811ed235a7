"""The pictures: each that a chapter shows is there, its script still draws it, it can be read.

Run: pytest tests/tutorials/test_figures.py [-k NAME]
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from book import needs_of

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


@pytest.fixture
def draw():
    """Draws a picture by its name."""
    needs("matplotlib")
    from tutorials.figures.__main__ import figures

    return lambda name: figures()[name]()


def test_pictures_and_chapters_belong_together():
    shown = {
        (chapter.parent / link).resolve()
        for chapter in [*CHAPTERS, ROOT / "README.md"]
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", chapter.read_text(encoding="utf-8"))
    }
    drawn = set(FIGURES.glob("*.png"))
    assert shown - drawn == set(), "a picture is missing"
    results = {path.stem for path in (ROOT / "tutorials" / "results").glob("*.json")}
    assert {path.stem for path in drawn - shown} <= results, "a picture that no page shows"


@pytest.mark.parametrize("name", names())
def test_a_picture_can_be_read(name, draw):
    if name == "vattention_tables":
        needs_of("20")
    figure = draw(name)
    from tests.tools.pictures import faults

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


def test_the_command(tmp_path, monkeypatch, capsys):
    needs("matplotlib")
    from PIL import Image

    from tutorials.figures import __main__ as command

    monkeypatch.setattr(command, "HERE", tmp_path)
    monkeypatch.setattr(command, "figures", lambda: {"one": empty, "other": empty})
    monkeypatch.setattr(sys, "argv", ["figures", "one"])
    command.main()
    assert [path.name for path in tmp_path.iterdir()] == ["one.png"]
    assert Image.open(tmp_path / "one.png").size == (240, 120)
    monkeypatch.setattr(sys, "argv", ["figures", "two"])
    with pytest.raises(SystemExit):
        command.main()
    assert "two: there is no such picture, but one, other" in capsys.readouterr().err


# --- each rule refuses something ---


def empty():
    from tutorials.figures.style import new_figure

    return new_figure(2, 1)


def test_a_good_picture():
    axes = good()
    assert faults_of(axes) == []


def good():
    """Two boxes, and two lines with their names."""
    needs("matplotlib")
    from tutorials.figures.fills import BLUE, WASTE
    from tutorials.figures.style import box, new_figure

    axes = new_figure(6, 3).subplots()
    box(axes, 0, 0, 1, 1, BLUE, "a")
    box(axes, 1, 0, 1, 1, WASTE, "b")
    for y, (name, line) in enumerate({"up": "-", "down": "--"}.items(), 2):
        axes.plot([0, 2], [y, y], line, color="black", label=name)
        axes.text(1, y + 0.05, name)
    axes.set_ylim(0, 4)
    return axes


def faults_of(axes) -> list[str]:
    from tests.tools.pictures import faults

    return faults(axes.figure)


def test_a_text_that_is_cut_off():
    axes = good()
    axes.figure.text(0.95, 0.5, "too long for this place")
    assert faults_of(axes) == ["'too long for this place' is cut off"]


def test_a_text_on_another():
    axes = good()
    axes.text(1, 3.5, "one")
    axes.text(1.02, 3.5, "two")
    assert faults_of(axes) == ["'one' lies on 'two'"]


def test_a_legend_on_data():
    axes = good()
    axes.legend(["line"], loc="upper right")
    assert faults_of(axes) == ["a legend lies on data"]
    axes.get_legend().remove()
    axes.figure.legend(["line"], loc="outside upper center")
    assert faults_of(axes) == []


def test_neighbors_that_are_alike_in_gray():
    axes = good()
    from tutorials.figures.fills import ORANGE, SKY
    from tutorials.figures.style import box

    gray_like_orange = ORANGE._replace(color="#A2A2A2")
    box(axes, 0.2, 1.2, 0.5, 0.5, ORANGE)
    box(axes, 0.7, 1.2, 0.5, 0.5, gray_like_orange, "c")
    assert faults_of(axes) == ["neighbors are alike in gray: 162 [] and 162 ['c']"]
    axes.text(0.4, 1.4, "d")  # now each says what it is
    assert faults_of(axes) == []
    box(axes, 1.3, 1.2, 0.5, 0.5, SKY)  # not a neighbor
    assert faults_of(axes) == []


def test_lines_that_are_alike_in_gray():
    axes = good()
    axes.plot([0, 2], [3.5, 3.5], color="#111111", label="third")
    axes.text(1, 3.6, "third")
    assert faults_of(axes) == ["lines are alike in gray: up and third"]


def test_a_line_without_a_name():
    axes = good()
    axes.plot([0, 2], [3.7, 3.7], color="0.5", label="third")
    axes.text(1, 2.5, "third")  # too far away
    assert faults_of(axes) == ["no text at the line says 'third'"]


def test_a_text_without_contrast():
    axes = good()
    from tutorials.figures.fills import GREEN, ORANGE, WASTE
    from tutorials.figures.style import box

    box(axes, 0.2, 1.2, 0.5, 0.5, ORANGE._replace(ink="white"), "c")
    box(axes, 1.2, 1.2, 0.1, 0.5, GREEN, "wider than its box")
    box(axes, 1.8, 1.2, 0.2, 0.5, WASTE)
    axes.text(1.85, 1.4, "d")
    assert faults_of(axes) == [
        "'c' is too pale on 162",
        "'wider than its box' is too pale on 255",
        "'d' is written on a hatch",
    ]
