"""Assignments 0 to 3: the reference solutions are short; the starters get what the handouts say.

Run: pytest tests/test_assignments_a.py [-k a1]
"""

import difflib
from hashlib import sha256
from pathlib import Path

import pytest

from nanovllm.schedule import ScheduleError
from tutorials.assignments.public import check_rules, load
from tutorials.assignments.task import load_task, measure

ROOT = Path(__file__).parent.parent
NAMES = ("a0", "a1", "a2", "a3")


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
    changed = [
        line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")
    ]
    assert 0 < len(changed) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_the_starter_gets_no_points_for_goals(name):
    """That the reference gets all is in test_assignments.py."""
    assert goal_points(name, starter(name), seed=101) == 0


@pytest.mark.slow
def test_each_class_of_a0_is_broken_and_can_be_mended(seed=101):
    task, broken, mended = load_task("a0"), load(starter("a0")), load(reference("a0"))
    for part in task.parts:
        with pytest.raises((ScheduleError, AssertionError, KeyError)):
            check_rules(part, broken, seed)
        managers = part.block_manager and getattr(mended, part.block_manager)
        values = measure(part, getattr(mended, part.scheduler), seed, managers)
        assert all(goal.score(values[goal.name]) == goal.points for goal in part.goals), values


def test_the_answers_of_a0_are_known_by_their_sums():
    answers = load(reference("a0")).ANSWERS
    assert {
        name: sha256(answer.encode()).hexdigest() for name, answer in answers.items()
    } == load_task("a0").questions
