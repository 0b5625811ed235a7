"""The reference solutions keep the rules, change no answer, and get all points from the grader.

The grading is on seeds that no handout has shown, and slow.

Run: pytest tests/test_assignments.py [-k a1] [--slow]
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tutorials.assignments.grade import secret_seeds
from tutorials.assignments.grader import Grader
from tutorials.assignments.public import check_answers, check_rules, load
from tutorials.assignments.task import NAMES, load_task

SOLUTIONS = Path(__file__).parent / "assignments"
STARTERS = Path(__file__).parent.parent / "tutorials" / "assignments"


NUM_JOBS = 60  # of a short load


def path_of(kind: str, name: str) -> Path:
    return (
        STARTERS / name / "starter.py" if kind == "starter" else SOLUTIONS / f"{name}_solution.py"
    )


@pytest.mark.parametrize(
    "kind, name",
    [("reference", name) for name in NAMES] + [("starter", name) for name in NAMES[1:]],
)
def test_the_rules_are_kept_in_a_short_load(kind, name):
    """The starter of a0 is broken."""
    module = load(path_of(kind, name))
    for part in load_task(name).parts:
        short = replace(part, workload=lambda seed, part=part: part.workload(seed)[:NUM_JOBS])
        assert len(check_rules(short, module, seed=1).requests) == NUM_JOBS


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_gets_all_points(name):
    # all engines in one process, below: it is faster
    task = replace(load_task(name), engine_points=0)
    grader = Grader(task, secret_seeds("for tests", name, 1))
    report = grader.grade(SOLUTIONS / f"{name}_solution.py")
    assert report.score == report.max_score == task.points, report.table()


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_reference_changes_no_answer(name):
    check_answers(load(SOLUTIONS / f"{name}_solution.py"))
