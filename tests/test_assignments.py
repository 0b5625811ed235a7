"""The grader gives each reference solution all points, on seeds that no handout has shown, and it changes no answer.

Run: pytest tests/test_assignments.py [-k a1]
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tutorials.assignments.grade import Grader, secret_seeds
from tutorials.assignments.public import check_answers, load
from tutorials.assignments.task import NAMES, load_task

SOLUTIONS = Path(__file__).parent / "assignments"


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_gets_all_points(name):
    task = replace(
        load_task(name), engine_points=0
    )  # all engines in one process, below: it is faster
    report = Grader(
        task, SOLUTIONS / f"{name}_solution.py", secret_seeds("for tests", name, 1)
    ).grade()
    assert report.score == report.max_score == task.points, report.table()


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_reference_changes_no_answer(name):
    check_answers(load(SOLUTIONS / f"{name}_solution.py"))
