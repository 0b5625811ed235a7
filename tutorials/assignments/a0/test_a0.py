"""Public tests of assignment 0: they pass from the start, and warn of each class that is still
broken.

Run: SOLUTION=my_scheduler.py pytest tutorials/assignments/a0
"""

import warnings
from pathlib import Path

import pytest

from tutorials.assignments.a0.task import INVARIANTS
from tutorials.assignments.public import check_rules, solution
from tutorials.assignments.task import PUBLIC_SEEDS, load_task

MODULE = solution(Path(__file__).with_name("starter.py"))


def test_answers_are_names_from_the_list():
    assert set(MODULE.ANSWERS) == {"A", "B", "C"}
    assert set(MODULE.ANSWERS.values()) <= {*INVARIANTS, "?"}, (
        f"choose from {', '.join(INVARIANTS)}"
    )


@pytest.mark.parametrize("part", load_task("a0").parts, ids=lambda part: part.name)
def test_what_is_still_broken(part):
    for seed in PUBLIC_SEEDS:
        try:
            check_rules(part, MODULE, seed)
        except Exception as error:  # a bug may end in any of them
            warnings.warn(
                f"{part.name} is broken, seed {seed}: {type(error).__name__}: {error}", stacklevel=1
            )
            return
