"""Assignments 0 to 3: the reference solutions are short and get all points; the starters get what the handouts say.

Run: pytest tests/test_assignments_a.py [-k a1]
"""

import difflib
from pathlib import Path

import pytest

from tutorials.assignments.public import load
from tutorials.assignments.task import load_task, measure

ROOT = Path(__file__).parent.parent
NAMES = [name for name in ("a0", "a1", "a2", "a3") if (ROOT / f"tests/assignments/{name}_solution.py").exists()]


def starter(name: str) -> Path:
    return ROOT / f"tutorials/assignments/{name}/starter.py"


def reference(name: str) -> Path:
    return ROOT / f"tests/assignments/{name}_solution.py"


def goal_points(name: str, path: Path, seed: int) -> float:
    """Raises ScheduleError if a rule is broken."""
    task, module = load_task(name), load(path)
    values = [(part, measure(part, getattr(module, part.scheduler), seed)) for part in task.parts]
    return sum(goal.score(value[goal.name]) for part, value in values for goal in part.goals)


@pytest.mark.parametrize("name", NAMES)
def test_the_points_of_a_task_add_up_to_100(name):
    assert load_task(name).points == 100


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_changes_at_most_15_lines(name):
    before, after = (path(name).read_text().splitlines() for path in (starter, reference))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")]
    assert 0 < len(changed) <= 15


@pytest.mark.parametrize("seed", (1, 101))
@pytest.mark.parametrize("name", [name for name in NAMES if name != "a0"])
def test_the_reference_gets_all_points_and_the_starter_none_for_goals(name, seed):
    goals = sum(goal.points for part in load_task(name).parts for goal in part.goals)
    assert goal_points(name, reference(name), seed) == goals
    assert goal_points(name, starter(name), seed) == 0
