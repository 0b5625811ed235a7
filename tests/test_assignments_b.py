"""Assignments 4 to 6: the reference solutions are short; the starters get what the handouts say.

Run: pytest tests/test_assignments_b.py [-k a4]
"""

import difflib
from pathlib import Path

import pytest

from tutorials.assignments.public import load
from tutorials.assignments.task import load_task, measure

ROOT = Path(__file__).parent.parent
STARTERS = {"a4": 0, "a5": 0, "a6": 5}  # points for goals


def starter(name: str) -> Path:
    return ROOT / f"tutorials/assignments/{name}/starter.py"


def reference(name: str) -> Path:
    return ROOT / f"tests/assignments/{name}_solution.py"


def goal_points(name: str, path: Path, seed: int) -> float:
    """Raises ScheduleError if a rule is broken."""
    (part,) = load_task(name).parts
    values = measure(part, load(path).MyScheduler, seed)
    return sum(goal.score(values[goal.name]) for goal in part.goals)


@pytest.mark.parametrize("name", STARTERS)
def test_the_points_of_a_task_add_up_to_100(name):
    assert load_task(name).points == 100


@pytest.mark.parametrize("name", STARTERS)
def test_the_reference_changes_at_most_15_lines(name):
    before, after = (path(name).read_text().splitlines() for path in (starter, reference))
    changed = [
        line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")
    ]
    assert 0 < len(changed) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTERS)
def test_the_starter_gets_what_its_handout_says(name):
    """That the reference gets all points is in test_assignments.py."""
    assert goal_points(name, starter(name), seed=101) == STARTERS[name]
