"""The plans of the course: chapters, exercises and constants are there, and words are counted.

Run: pytest tests/tutorials/test_course.py
"""

import ast
import re

import pytest
from book import ROOT, TUTORIALS, num_words

from tutorials.words import minutes

COURSE = (TUTORIALS / "course.md").read_text(encoding="utf-8")
WEEK = re.compile(r"^\| (\d+) \| (\d\d(?:, \d\d)*) \| ([\d,]+) \| (\d+) \| (.*?) \|", re.MULTILINE)
WEEKS = WEEK.findall(COURSE)
CONSTANT = re.compile(r"^\| (a\d) \| `(\w+)` \| (.*?) \|", re.MULTILINE)


def text_of(number: str) -> str:
    (chapter,) = TUTORIALS.glob(f"{number}_*.md")
    return chapter.read_text(encoding="utf-8")


def is_about(num_said: str, number: int) -> bool:
    """Within a tenth, so that a sentence more in a chapter changes no plan."""
    return abs(int(num_said.replace(",", "")) - number) <= number / 10


def test_there_are_two_plans():
    assert [int(week) for week, *_ in WEEKS] == [*range(1, 5), *range(1, 13)]


def test_the_words_of_an_evening():
    page = (TUTORIALS / "how_to_read.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d\d) .*?\) \| ([\d,]+) \|", page, re.MULTILINE)
    assert [number for number, _ in rows] == ["00", "01", "02", "03"]
    for number, words in rows:
        assert is_about(words, num_words(text_of(number))), number


@pytest.mark.parametrize("week", WEEKS, ids=lambda week: f"{week[0]}: {week[1]}")
def test_the_words_of_a_week(week):
    """And the minutes."""
    _, chapters, words, num_minutes, _ = week
    texts = [*map(text_of, chapters.split(", "))]
    assert is_about(words, sum(map(num_words, texts)))
    assert is_about(num_minutes, sum(map(minutes, texts)))


@pytest.mark.parametrize("week", WEEKS, ids=lambda week: f"{week[0]}: {week[1]}")
def test_the_exercises_of_a_week(week):
    """They are of its chapters, and have a check."""
    _, chapters, _, _, exercises = week
    for exercise in exercises.split(", "):
        number, _, k = exercise.partition(".")
        assert number in chapters.split(", ")
        checks = TUTORIALS / "exercises" / "checks" / f"chapter{number}.py"
        assert f"def check_{k}(" in checks.read_text(encoding="utf-8"), exercise


def test_the_constants_of_the_assignments():
    """Each stands below its comment, with the value that the page says."""
    constants = CONSTANT.findall(COURSE)
    assert [name for name, *_ in constants] == [f"a{i}" for i in range(1, 10)]
    for name, constant, value in constants:
        task = TUTORIALS / "assignments" / name / "task.py"
        lines = task.read_text(encoding="utf-8").splitlines()
        (at,) = [i for i, line in enumerate(lines) if line.startswith("# from year to year")]
        assigned = ast.parse(lines[at + 1]).body[0]
        assert isinstance(assigned, ast.Assign)
        assert ast.unparse(assigned.targets[0]) == constant
        assert ast.literal_eval(assigned.value) == ast.literal_eval(value), name


def test_what_assistants_are_told_of_is_there():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:tests|tutorials|scripts)/[\w./]+)`", text)
    assert len(paths) > 4
    missing = {path for path in paths if not (ROOT / path).exists()}
    assert missing <= {"tests/course/solutions/"}  # which is not handed out
