"""The error message for a student's file, with the line."""

import linecache
import traceback
from pathlib import Path
from typing import Any

from nanovllm.schedule import ScheduleError
from tutorials.assignments.report import one_line

MOST_FRAMES = 8  # of a traceback


def problem_of(error: BaseException, file: Path) -> dict[str, Any]:
    """A sentence; the line of the file, or None; the way there."""
    line = line_of(error, file)
    said = one_line(str(error).partition("\nassert ")[0])  # pytest writes more
    is_ours = isinstance(error, AssertionError | ScheduleError)  # it is an error message already
    sentence = said if said and is_ours else f"{type(error).__name__}: {said}".rstrip(": ")
    if isinstance(error, MemoryError):
        sentence = "The run needs more memory than the lab gives it."
    if isinstance(error, SyntaxError):
        sentence = f"{type(error).__name__}: {one_line(error.msg or '')}"
    if line is not None:
        sentence = f"line {line}: {sentence}"
    linecache.checkcache(str(file))  # it has other lines than in the last run
    return {"sentence": sentence, "line": line, "trace": trace_of(error, file)}


def trace_of(error: BaseException, file: Path) -> str:
    """The way from the file to the error; nothing if it was not on the way."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != str(file):
        step = step.tb_next
    if step is None:
        return ""
    lines = traceback.format_exception(type(error), error, step, limit=-MOST_FRAMES, chain=False)
    return "".join(lines)[-4000:]


def line_of(error: BaseException, file: Path) -> int | None:
    """The last one of the file that was on the way."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    return lines[-1] if lines else None
