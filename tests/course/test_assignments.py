"""The assignments: points add up, reference solutions are short, right and get all points, starters get nearly none.

The grading is on seeds that no handout has shown, and slow. That the goals are honest is in test_goals.py.

Run: pytest tests/course/test_assignments.py [-k a1] [--slow]
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tutorials.assignments.grade import secret_seeds
from tutorials.assignments.grader import Grader
from tutorials.assignments.public import check_answers, check_rules, load
from tutorials.assignments.seeds import measure_seed, points_of
from tutorials.assignments.task import NAMES, load_task

SOLUTIONS = Path(__file__).parent / "solutions"
ASSIGNMENTS = Path(__file__).parents[2] / "tutorials" / "assignments"
POLICIES = tuple(name for name in NAMES if name != "a0")  # in a0 bugs are to be found
# a router has no part in an engine
IN_AN_ENGINE = tuple(name for name in POLICIES if load_task(name).engine_points)
NUM_JOBS = 60  # of a short load
SECTIONS = ["The problem", "Read before", "What to do", "Try it", "Hints", "How it is graded"]


def starter(name: str) -> Path:
    return ASSIGNMENTS / name / "starter.py"


def reference(name: str) -> Path:
    return SOLUTIONS / f"{name}_solution.py"


def test_no_assignment_is_left_out():
    """Their names are those of folders."""
    assert NAMES[:10] == tuple(f"a{i}" for i in range(10))
    assert NAMES[-1] == "template"


# --- what an assignment consists of ---


@pytest.mark.parametrize("name", NAMES)
def test_the_points_of_a_task_add_up_to_100(name):
    assert load_task(name).points == 100


@pytest.mark.parametrize("name", NAMES)
def test_the_handout_has_the_parts_that_a_handout_has(name):
    text = (ASSIGNMENTS / name / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^Level: .*hour", text, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == SECTIONS


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_short(name):
    before, after = (
        path(name).read_text(encoding="utf-8").splitlines() for path in (starter, reference)
    )
    changed = [
        line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")
    ]
    assert 0 < len(changed) <= 15 or (name in ("a7", "a8") and len(after) < 40)


@pytest.mark.parametrize("name", POLICIES)
def test_one_constant_is_for_another_year(name):
    source = (ASSIGNMENTS / name / "task.py").read_text(encoding="utf-8")
    (constant,) = re.findall(r"^# from year to year: .*\n([A-Z_]+) = ", source, re.MULTILINE)
    assert len(re.findall(rf"\b{constant}\b", source)) > 1  # it is used


# --- correct ---


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize(
    "path", [*map(reference, NAMES), *map(starter, POLICIES)], ids=lambda path: str(path)[-16:-3]
)
def test_the_rules_are_kept_in_a_short_load(path):
    """The starter of a0 is broken."""
    name = path.parent.name if path.name == "starter.py" else path.stem.partition("_")[0]
    module = load(path)
    for part in load_task(name).parts:
        short = replace(part, workload=lambda seed, part=part: part.workload(seed)[:NUM_JOBS])
        assert len(check_rules(short, module, seed=1).requests) == NUM_JOBS


@pytest.mark.slow(but_every=3)
@pytest.mark.parametrize("name", IN_AN_ENGINE)
def test_the_reference_changes_no_answer(name):
    for part in load_task(name).parts:
        check_answers(part, load(reference(name)))


# --- points ---


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_gets_all_points(name):
    # all engines in one process, above: it is faster; and many seeds in test_goals.py
    task, module = replace(load_task(name), engine_points=0), f"tutorials.assignments.{name}.task"
    grader = Grader(task, module, secret_seeds("for tests", name, 1))
    *_, report = grader.grade(reference(name))
    assert report.score == report.max_score == task.points, report.table()


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES[1::4])
def test_the_starter_gets_hardly_any_points_for_goals(name, seed=101):
    task = load_task(name)
    values = measure_seed(task, [starter(name)], check=True, seed=seed)["starter"]
    assert points_of(task, values) < sum(goal.points for goal in task.goals.values()) / 10
