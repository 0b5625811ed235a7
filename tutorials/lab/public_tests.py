"""The public tests of an assignment, one by one, without pytest.

In the browser there is no pytest: `stand_in` is what the files of tests need of it. Imports no torch.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tutorials.lab.problems import problem_of

NEEDS_ENGINE = "is left to your machine, or to the grader: it needs PyTorch"
SHARED = "tutorials.assignments.public_tests"


class PublicTest(NamedTuple):
    """One test, with its values."""

    name: str
    values: dict[str, Any]
    work: Callable[..., None]

    @property
    def sentence(self) -> str:
        """What it says: its name."""
        words = self.name.removeprefix("test_").replace("_", " ")
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{words} ({values})" if values else words


# --- instead of pytest ---


def stand_in() -> ModuleType:
    """A module `pytest` with the marks that the files of tests use."""
    module = ModuleType("pytest")
    module.mark = Marks()
    return module


class Marks:
    def __getattr__(self, name: str) -> Any:
        return Mark(name)


class Mark:
    """A decorator. Notes itself at the test, as pytest does."""

    def __init__(self, name: str, args: tuple = ()):
        self.name = name
        self.args = args

    def __call__(self, *args: Any) -> Any:
        if len(args) == 1 and inspect.isfunction(args[0]):
            test = args[0]
            test.pytestmark = [*getattr(test, "pytestmark", []), self]
            return test
        return Mark(self.name, args)


# --- which tests there are ---


def public_tests(task: str, file: Path) -> list[PublicTest]:
    """Of the assignment, for this file."""
    try:
        importlib.import_module("pytest")
    except ModuleNotFoundError:
        sys.modules["pytest"] = stand_in()
    os.environ["SOLUTION"] = str(file)  # the files of tests look there, when they are read
    for name in (SHARED, f"tutorials.assignments.{task}.test_{task}"):
        sys.modules.pop(name, None)
    module = importlib.import_module(f"tutorials.assignments.{task}.test_{task}")
    found = [*vars(module).items()]
    tests = [test for name, value in found for test in tests_in(name, value)]
    return sorted(tests, key=lambda test: "answers" in test.name)  # the real engine's last


def tests_in(name: str, value: Any) -> Iterator[PublicTest]:
    if name.startswith("Test"):
        one = value()
        for method, work in inspect.getmembers(one, inspect.ismethod):
            if method.startswith("test_"):
                yield from variants(method, work)
    elif name.startswith("test_"):
        yield from variants(name, value)


def variants(name: str, work: Callable[..., None]) -> Iterator[PublicTest]:
    for mark in getattr(work, "pytestmark", []):
        if mark.name == "parametrize":
            argument, values = mark.args
            for value in values:
                yield PublicTest(name, {argument: value}, work)
            return
    yield PublicTest(name, {}, work)


def outcome(test: PublicTest, file: Path) -> dict[str, Any]:
    """Runs it. The sentence of a test that fails is that of its assertion."""
    state, why = "passed", ""
    try:
        test.work(**test.values)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        state, why = "left out", NEEDS_ENGINE
    except Exception as error:
        state, why = "failed", problem_of(error, file)["sentence"]
    return {"test": test.sentence, "state": state, "why": why}
