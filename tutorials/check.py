"""Checks your answers to the exercises of a chapter, which you write into `tutorials/exercises`.

python -m tutorials.check 02              all three exercises of chapter 02
python -m tutorials.check 02.3 03.1       one of them, and one of another chapter
python -m tutorials.check 02 --file MY    answers in another file
"""

import argparse
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from tutorials.exercises.checks.expect import Wrong, expect

EXERCISES = Path(__file__).parent / "exercises"
LIMIT = 120.0  # seconds, on a slow laptop, too
WAITING = 10  # times the limit, by the clock
Check = Callable[[ModuleType], None]


def checks_of(chapter: str) -> dict[str, Check]:
    """The checks of a chapter, by the name of the exercise: "02.1", "02.2", ..."""
    module = importlib.import_module(f"tutorials.exercises.checks.chapter{chapter}")
    found = (name for name in vars(module) if re.fullmatch(r"check_\d", name))
    return {f"{chapter}.{name[-1]}": getattr(module, name) for name in sorted(found)}


def load(path: Path) -> ModuleType:
    """The file with the answers, as a module. Runs it."""
    spec = importlib.util.spec_from_file_location("answers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["answers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def line_in(path: Path, frames: traceback.StackSummary) -> str:
    """Which line of the answers was reached last, if any."""
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f"{path.name}, line {lines[-1]}: " if lines else ""


def verdict(call: Callable[[], None], path: Path, limit: float = LIMIT) -> str | None:
    """None if the call returns; otherwise an error message.

    Runs the call in a thread, so that an answer which never returns also gets a message. The limit is
    processor time, so that other programs do not count; ten times as long by the clock for an answer
    that only waits.
    """
    found: list[str] = []

    def attempt() -> None:
        try:
            uses_checks = "exercises.checks" in path.read_text(encoding="utf-8")
            expect(not uses_checks, "your file uses the checks themselves: write it yourself")
            call()
        except Wrong as wrong:
            found.append(str(wrong))
        except NotImplementedError:
            found.append("not written yet")
        except BaseException as error:  # SystemExit, too: an answer may raise anything
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            if isinstance(error, AttributeError) and error.obj is sys.modules.get("answers"):
                what = f"your file has no {error.name}: the exercise needs this name"
            found.append(line_in(path, traceback.extract_tb(error.__traceback__)) + what)

    thread = threading.Thread(target=attempt, daemon=True)
    spent, clock = time.process_time(), time.monotonic()
    thread.start()
    while thread.is_alive() and time.process_time() - spent < limit:
        thread.join(min(0.1, limit))
        if time.monotonic() - clock > WAITING * limit:
            break
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is not None and thread.is_alive():
        return line_in(path, traceback.extract_stack(frame)) + f"still runs after {limit:g} s"
    return found[0] if found else None


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """`wanted`: for each argument its chapter, the exercise or None for all, and the file with the
    answers; and the `limit`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "a chapter, such as 02, or one exercise, such as 02.3"
    parser.add_argument("what", nargs="+", help=what)
    parser.add_argument("--file", type=Path, help="default: tutorials/exercises/chapterNN.py")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one exercise")
    args = parser.parse_args(arguments)
    if not 0 < args.limit < threading.TIMEOUT_MAX:
        parser.error(f"--limit {args.limit} is not allowed: it must be a positive number")
    chapters = [path.stem[-2:] for path in sorted(EXERCISES.glob("chapter*.py"))]
    args.wanted = []
    for what in args.what:
        match = re.fullmatch(r"(\d{1,2})(\.[123])?", what)
        chapter = match[1].zfill(2) if match else ""
        if match is None or chapter not in chapters:
            parser.error(f"{what!r} has no exercises: choose from {', '.join(chapters)}")
        file = (args.file or EXERCISES / f"chapter{chapter}.py").resolve()
        if not file.is_file():
            parser.error(f"there is no file {file}")
        args.wanted.append((chapter, chapter + match[2] if match[2] else None, file))
    return args


def all_hold(chapter: str, exercise: str | None, file: Path, limit: float) -> bool:
    """Prints a line for each exercise."""
    modules: list[ModuleType] = []
    problem = verdict(lambda: modules.append(load(file)), file, limit)
    if problem:
        print(f"your file does not load: {problem}")
        return False
    num_wrong = 0
    for name, check in checks_of(chapter).items():
        if exercise in (None, name):
            problem = verdict(partial(check, modules[0]), file, limit)
            num_wrong += problem is not None
            print(f"{name}: {problem or 'holds'}", flush=True)
    return num_wrong == 0


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    logging.disable()  # the engine logs what an answer raises, and it is printed
    judged = [all_hold(*wanted, args.limit) for wanted in args.wanted]
    return int(not all(judged))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console may lack a letter
    try:
        status = main()
    except KeyboardInterrupt:
        print("interrupted")
        status = 130
    sys.stdout.flush()
    os._exit(status)  # an answer that never returns must not keep the process
