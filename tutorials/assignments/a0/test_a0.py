"""Public tests of assignment 0: they pass from the start, and warn of each class that is still
broken, and of each answer that is not right.

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a0
"""

import warnings
from pathlib import Path

import pytest

from tutorials.assignments.public import check_rules, solution
from tutorials.assignments.task import PUBLIC_SEEDS, load_task

TASK = load_task("a0")
MODULE = solution(Path(__file__).with_name("starter.py"))


def test_there_is_an_answer_to_each_question():
    assert set(MODULE.ANSWERS) == set(TASK.questions)


@pytest.mark.parametrize("name", TASK.questions)
def test_what_is_wrong_with_an_answer(name):
    problem = TASK.questions[name](MODULE.ANSWERS[name])
    if problem is not None:
        warnings.warn(f"ANSWERS[{name!r}]: {problem}", stacklevel=1)


@pytest.mark.parametrize("part", TASK.parts, ids=lambda part: part.name)
def test_what_is_still_broken(part):
    for seed in PUBLIC_SEEDS:
        try:
            check_rules(part, MODULE, seed)
        except Exception as error:  # a bug may end in any of them
            warnings.warn(
                f"{part.name} is broken, seed {seed}: {type(error).__name__}: {error}", stacklevel=1
            )
            return
