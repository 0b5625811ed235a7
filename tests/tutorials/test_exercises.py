"""The exercises: each check lets the solution pass, says what an untouched stub lacks, and refuses known wrong answers.

Run: pytest tests/tutorials/test_exercises.py [-k 02.3]
"""

import re
import subprocess
import sys

import pytest
from book import CHAPTERS, ROOT, TUTORIALS, needs_of, solutions
from wrong_answers.read import wrong_answers

from tutorials import check

EXERCISES = TUTORIALS / "exercises"
NAMES = {chapter.name[:2]: chapter for chapter in CHAPTERS}
EACH = [f"{number}.{i}" for number in NAMES for i in (1, 2, 3)]
WRONG = {number: wrong_answers(number) for number in NAMES}
ALL_WRONG = [answer for answers in WRONG.values() for answer in answers]


def judged(exercise: str, code: str, tmp_path) -> str | None:
    """What the check says of the stub's file with this code behind it."""
    needs_of(exercise[:2])
    stub = (EXERCISES / f"chapter{exercise[:2]}.py").read_text(encoding="utf-8")
    path = tmp_path / "answers.py"
    path.write_text(f"{stub}\n{code}\n")
    answers = check.load(path)
    test = check.checks_of(exercise[:2])[exercise]
    return check.verdict(lambda: test(answers), path)


@pytest.mark.parametrize("number", NAMES)
def test_a_chapter_has_three_exercises(number):
    needs_of(number)
    chapter = NAMES[number]
    names = [f"{number}.{i}" for i in (1, 2, 3)]
    assert [*check.checks_of(number)] == names
    text = chapter.read_text(encoding="utf-8")
    assert re.findall(r"^\*\*(\d\d\.\d) .*\((?:easy|medium|hard)\)\.\*\*", text, re.M) == names
    assert f"python -m tutorials.check {number}" in text
    assert {answer.exercise for answer in WRONG[number]} == {*names}


@pytest.mark.parametrize("exercise", EACH)
def test_the_solution_passes(exercise, tmp_path):
    code = solutions(NAMES[exercise[:2]])[exercise]
    assert judged(exercise, code, tmp_path) is None


@pytest.mark.parametrize("exercise", EACH)
def test_the_stub_fails_and_says_why(exercise, tmp_path):
    assert judged(exercise, "", tmp_path) == "not written yet"


@pytest.mark.parametrize("answer", ALL_WRONG, ids=lambda answer: f"{answer.exercise} {answer.name}")
def test_a_wrong_answer_fails(answer, tmp_path):
    code = answer.code(solutions(NAMES[answer.exercise[:2]])[answer.exercise])
    sentence = judged(answer.exercise, code, tmp_path)
    assert sentence and re.search(answer.says, sentence), sentence


@pytest.mark.parametrize("answer", wrong_answers("right"), ids=lambda answer: answer.exercise)
def test_another_right_answer_passes(answer, tmp_path):
    assert judged(answer.exercise, answer.text, tmp_path) is None


# --- the command ---


def test_the_command_says_each_result(tmp_path, capsys):
    number = "02"
    path = tmp_path / "mine.py"
    code = "\n".join([*solutions(NAMES[number]).values()][:2])
    path.write_text((EXERCISES / f"chapter{number}.py").read_text(encoding="utf-8") + code)
    assert check.main([number, "--file", str(path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["02.1: holds", "02.2: holds", "02.3: not written yet"]
    assert check.main(["2.1", "--file", str(path)]) == 0
    assert capsys.readouterr().out == "02.1: holds\n"
    assert check.main(["02.1", "02.3", "--file", str(path)]) == 1
    assert capsys.readouterr().out == "02.1: holds\n02.3: not written yet\n"


@pytest.mark.parametrize(
    "code, said",
    [
        (
            "def hits(n):\n    return n / 0\n",
            "mine.py, line 2: ZeroDivisionError: division by zero",
        ),
        ("def hits(n):\n    raise SystemExit\n", "mine.py, line 2: SystemExit"),
        ("hits = None\n", "TypeError: 'NoneType' object is not callable"),
        ("x = 1\n", "your file has no hits: the exercise needs this name"),
    ],
)
def test_an_answer_that_raises_is_a_sentence_with_its_line(code, said, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(code)
    assert check.main(["02.1", "--file", str(path)]) == 1
    assert capsys.readouterr().out == f"02.1: {said}\n"


def test_an_answer_that_never_returns(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def pieces(*args):\n    n = 0\n    while True:\n        n += 1\n")
    # chapter 15: its checks need no torch, which takes seconds to import
    command = [sys.executable, "-m", "tutorials.check", "15.1", "--file", str(path), "--limit", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"15.1: mine.py, line [34]: still runs after 1 s\n", result.stdout)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_file_that_does_not_load(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\ny = (\n")
    assert check.main(["02", "--file", str(path)]) == 1
    assert "your file does not load: SyntaxError" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def no_answers_left():
    yield
    sys.modules.pop("answers", None)
