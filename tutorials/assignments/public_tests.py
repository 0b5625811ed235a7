"""The tests that the public tests of the assignments share. Apart from public.py, because the
grader needs no pytest."""

import os
from pathlib import Path
from types import ModuleType

import pytest

from tutorials.assignments.public import check_answers, check_rules, solution
from tutorials.assignments.task import PUBLIC_SEEDS, Part, load_task

# a starter, which is there if nothing else is named, is right on all of them
SEEDS = PUBLIC_SEEDS if "SOLUTION" in os.environ else PUBLIC_SEEDS[:1]


def under_test(file: str) -> tuple[Part, ModuleType]:
    """What the tests in this file look at: a part of the assignment, and the student's file."""
    folder = Path(file).parent
    return load_task(folder.name).parts[0], solution(folder / "starter.py")


class RuleTests:
    """A test file derives a class from it, and says what is tested."""

    part: Part
    module: ModuleType  # the student's file

    @pytest.mark.slow  # but not for a student: see conftest.py
    @pytest.mark.parametrize("seed", SEEDS)
    def test_every_request_is_answered_and_every_step_keeps_the_rules(self, seed):
        check_rules(self.part, self.module, seed)


class PublicTests(RuleTests):
    """For a scheduler, which the real engine can have, too."""

    def test_the_real_engine_gives_the_same_answers(self):
        check_answers(self.part, self.module)
