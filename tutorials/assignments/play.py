"""The process in which a student's file is played. `grader.py` starts it, once for each of these:

    load             imports the file, and looks at its answers to questions
    part INDEX SEED  a simulation of this part of the task, beside the baseline
    engine           the real engine, with the student's scheduler and scarce memory

It writes an `Outcome`, and ends. Limits of time are processor time: a busy machine fails no file.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tutorials.assignments.public import check_answers, check_rules, classes_of, explained, load
from tutorials.assignments.report import Outcome, outcome_of
from tutorials.assignments.task import Part, Task, serve_baseline

try:
    import resource
except ModuleNotFoundError:
    raise SystemExit("the grader needs Linux or macOS: on Windows, run it in WSL") from None

SHARE_OF_A_CALL = 1 / 6  # of the limit: to load the file, or to plan a step
GRACE = 2  # seconds from the limit until the system ends the process
BYTES = 4 * 2**30  # of memory
BYTES_OF_A_FILE = 64 * 2**20  # what is printed is a file, too


class TooSlow(BaseException):
    """Raised in the line that runs. No `except Exception` catches it."""


def set_limits(limit: int) -> None:
    """Of a process, in seconds of a processor."""

    def end(*_: Any) -> None:
        raise TooSlow(f"your file has taken more than {limit} s of a processor")

    signal.signal(signal.SIGXCPU, end)
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, limit, limit + GRACE),
        (resource.RLIMIT_DATA, BYTES, BYTES),
        (resource.RLIMIT_FSIZE, BYTES_OF_A_FILE, BYTES_OF_A_FILE),
    ):
        with suppress(ValueError):  # there is a lower limit already
            resource.setrlimit(kind, (soft, hard))


def limited(call: Callable[..., Any], limit: float) -> Callable[..., Any]:
    """The same function. Raises TooSlow after its share of the limit."""
    seconds = SHARE_OF_A_CALL * limit

    def end(*_: Any) -> None:
        raise TooSlow(f"this has taken more than {seconds:g} s of a processor")

    @wraps(call)
    def wrapper(*args: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return call(*args)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    signal.signal(signal.SIGPROF, end)
    return wrapper


def with_limit(policy_cls: type, name: str, limit: float) -> type:
    """The same class. Each call of its method with this name is limited."""

    def __init__(self: Any, *args: Any) -> None:
        policy_cls.__init__(self, *args)
        setattr(self, name, limited(getattr(self, name), limit))  # messages still name its class

    return type(policy_cls.__name__, (policy_cls,), {"__init__": __init__})


# --- what there is to play ---


def play_load(task: Task, module: ModuleType) -> Outcome:
    answers = getattr(module, "ANSWERS", None)
    if not isinstance(answers, dict):
        answers = {}
    return Outcome(
        verdicts={what: check(answers.get(what)) for what, check in task.questions.items()}
    )


def limited_module(part: Part, module: ModuleType, limit: float) -> SimpleNamespace:
    """The student's file, with a limit for each step."""
    name, base = part.policy
    policy_cls, _ = classes_of(part, module)
    if policy_cls is not base:  # otherwise only the block manager is the student's
        method = "schedule" if part.router is None else "choose"
        policy_cls = with_limit(policy_cls, method, limit)
    return SimpleNamespace(**{**vars(module), name: policy_cls})


def play(task: Task, path: Path, limit: float, what: str, index: int = 0, seed: int = 1) -> Outcome:
    try:
        decode_source(path.read_bytes())
    except (OSError, UnicodeDecodeError, SyntaxError, LookupError) as error:
        return Outcome(f"your file cannot be read, save it as UTF-8: {error}")
    try:
        module = limited(load, limit)(path)
        if what == "load":
            return play_load(task, module)
        part = task.parts[index]
        seen = limited_module(part, module, limit)
        if what == "engine":
            check_answers(part, seen)
            return Outcome()
        return outcome_of(part, check_rules(part, seen, seed), serve_baseline(part, seed))
    except BaseException as error:  # SystemExit, too
        return Outcome(explained(error, path))


def main() -> None:
    target, module, path, limit, what, *numbers = sys.argv[1:]
    task = import_module(module).TASK
    set_limits(int(limit))
    outcome = play(task, Path(path), int(limit), what, *map(int, numbers))
    Path(target).write_bytes(pickle.dumps(outcome))
    os._exit(0)  # threads of the file do not keep the process alive
