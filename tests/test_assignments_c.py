"""Assignment 7: the starter gets the points that the handout says, and the reference solution is short.

Run: pytest tests/test_assignments_c.py
"""

from pathlib import Path

import pytest

from tutorials.assignments.public import load
from tutorials.assignments.task import load_task, measure

ROOT = Path(__file__).parent.parent
STARTER, REFERENCE = (
    ROOT / "tutorials/assignments/a7/starter.py",
    ROOT / "tests/assignments/a7_solution.py",
)
TASK = load_task("a7")
PART = TASK.parts[0]


def points(path: Path, seed: int) -> list[float]:
    """Of each goal. Raises ScheduleError if a rule is broken."""
    values = measure(PART, load(path).MyScheduler, seed)
    return [goal.score(values[goal.name]) for goal in PART.goals]


def test_the_points_add_up_to_100():
    assert TASK.points == 100


def test_the_reference_is_short():
    assert len(REFERENCE.read_text().splitlines()) < 40


@pytest.mark.slow
def test_the_starter_gets_none_for_goals(seed=103):
    """That the reference gets all points is in test_assignments.py."""
    assert points(STARTER, seed) == [0] * len(PART.goals)
