"""Runs a student's file in a process. `grader.py` starts it, once for each of these:

    load             imports the file, and looks at its answers to questions
    part INDEX SEED  a simulation of this part of the task, beside the baseline
    engine           the real engine, with the student's scheduler and scarce memory

It writes an `Outcome`, and ends. Limits of time are processor time: a busy machine fails no file.
"""

import json
import os
import pickle
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import decode_source
from pathlib import Path
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any

from tutorials.assignments.public import check_answers, check_rules, explained, load
from tutorials.assignments.report import Outcome, outcome_of
from tutorials.assignments.task import Task, serve_baseline

try:
    import resource
except ModuleNotFoundError:
    raise SystemExit("the grader needs Linux or macOS: on Windows, run it in WSL") from None

TICKS = 6  # during the limit: a call of the file that sees two of them is ended
GRACE = 2  # seconds from the limit until the system ends the process
BYTES = 4 * 2**30  # of memory
BYTES_OF_A_FILE = 64 * 2**20  # what is printed is a file, too


class TooSlow(BaseException):
    """Raised in the line that runs. No `except Exception` catches it."""


def set_limits(path: Path, limit: int) -> None:
    """Of this process, in seconds of a processor, and of each call of a function of the file."""
    seen: list[FrameType] = []  # at the last tick

    def tick(number: int, frame: FrameType | None) -> None:
        calls = [one for one, _ in walk_stack(frame) if one.f_code.co_filename == str(path)]
        if any(one is other for one in calls for other in seen):
            raise TooSlow(f"this call has taken more than {limit / TICKS:g} s of a processor")
        seen[:] = calls

    def end(*_: Any) -> None:
        raise TooSlow(f"your file has taken more than {limit} s of a processor")

    signal.signal(signal.SIGPROF, tick)
    signal.setitimer(signal.ITIMER_PROF, limit / TICKS, limit / TICKS)
    signal.signal(signal.SIGXCPU, end)
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, limit, limit + GRACE),
        (resource.RLIMIT_DATA, BYTES, BYTES),
        (resource.RLIMIT_FSIZE, BYTES_OF_A_FILE, BYTES_OF_A_FILE),
    ):
        with suppress(ValueError):  # there is a lower limit already
            resource.setrlimit(kind, (soft, hard))


def verdicts(task: Task, module: ModuleType) -> dict[str, str | None]:
    """What is wrong with the answer to each question."""
    answers = getattr(module, "ANSWERS", None)
    if not isinstance(answers, dict):
        answers = {}
    return {name: check(answers.get(name)) for name, check in task.questions.items()}


def play(task: Task, path: Path, what: str, index: int = 0, seed: int = 1) -> Outcome:
    try:
        decode_source(path.read_bytes())
    except (OSError, UnicodeDecodeError, SyntaxError, LookupError) as error:
        return Outcome(f"your file cannot be read, save it as UTF-8: {error}")
    try:
        module = load(path)
        if what == "load":
            return Outcome(verdicts=verdicts(task, module))
        part = task.parts[index]
        if what == "engine":
            check_answers(part, module)
            return Outcome()
        return outcome_of(part, check_rules(part, module, seed), serve_baseline(part, seed))
    except BaseException as error:  # SystemExit, too
        return Outcome(explained(error, path))


def main() -> None:
    target, module, path, limit, what, *numbers = json.load(sys.stdin)  # the pipe is empty then
    task = import_module(module).TASK
    set_limits(Path(path), limit)
    outcome = play(task, Path(path), what, *numbers)
    signal.setitimer(signal.ITIMER_PROF, 0)
    Path(target).write_bytes(pickle.dumps(outcome))
    os._exit(0)  # threads of the file do not keep the process alive
