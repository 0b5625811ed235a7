"""Runs the tests of a milestone against a student's package, in a process of its own.

Writes a line of JSON for each event, so that a file that never returns leaves a trace, too. Imports
nothing of nanovllm before the student's package is first on the path.
"""

import gc
import importlib
import json
import logging
import operator
import os
import signal
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tutorials.building.gains import GAINS
from tutorials.building.holes import function_at
from tutorials.building.milestones import title_of

ROOT = Path(__file__).parents[2]
LONGEST = 360  # characters of a value in a sentence
QUIET = ["-c", f"{ROOT / 'pyproject.toml'}", "--rootdir", f"{ROOT}"]
QUIET += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]  # which collects garbage
HOLDS: dict[str, Any] = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}
HOLDS |= {"<=": operator.le, ">=": operator.ge, "is": operator.is_, "is not": operator.is_not}
HOLDS |= {"in": lambda left, right: left in right, "not in": lambda left, right: left not in right}


def short(value: object) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def place_of(error: BaseException, package: Path) -> tuple[str, str]:
    """The line of the student's package that was reached last; and the function around it. If the file
    is as in our package, also the student's line that has led there. An assertion of a test, which the
    engine has called, has none."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError):
        frames = frames[-1:]
    places = []
    name = ""
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(package):
            source = path.read_text(encoding="utf-8")
            name = name or function_at(source, frame.lineno or 0)
            module = path.relative_to(package)
            is_ours = source == (ROOT / "nanovllm" / module).read_text(encoding="utf-8")
            if not places or not is_ours:
                places.append(f"{module}, line {frame.lineno}")
            if not is_ours:
                break
    return ", called by ".join(places), name


def problem_of(error: BaseException, package: Path) -> str:
    """A sentence about the error, without a traceback."""
    while group := getattr(error, "exceptions", ()):
        error = group[0]  # hypothesis has found several
    cause = error
    while cause is not None and not isinstance(cause, NotImplementedError):
        cause = cause.__cause__  # the engine may have made another error of it
    error = cause or error
    place, function = place_of(error, package)
    if isinstance(error, NotImplementedError) and str(error).startswith("milestone "):
        return f"{function} is still open ({error})"
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or '').name}, line {error.lineno}"
        return f"{place}: {type(error).__name__}: {error.msg}"
    what = short(str(error))
    if isinstance(error, AssertionError) and not place:
        last = traceback.extract_tb(error.__traceback__)[-1].line
        return what.removeprefix("assert ") or f"`{short(last or '')}` does not hold"
    return f"{place or 'the test'}: {type(error).__name__}: {what}".removesuffix(": ")


def sentence(item: pytest.Item, error: BaseException, package: Path) -> str:
    """What was expected, what came, and for which input."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    given = ", ".join(f"{name}={short(value)}" for name, value in params.items())
    said = problem_of(error, package)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if Path(frame.filename) == item.path]
    is_whole = lines and lines[-1].startswith("assert ") and not lines[-1].endswith("(")
    if isinstance(error, AssertionError) and is_whole:
        said = f"`{short(lines[-1].removeprefix('assert '))}`: {said}"
    elif lines and said.startswith("the test: "):
        said = f"`{short(lines[-1])}`: {said.removeprefix('the test: ')}"
    if item.nodeid.endswith("::runTest"):  # of hypothesis.stateful
        return said
    return f"{title_of(item.nodeid)}{f' ({given})' if given else ''}: {said}"


def holds(op: str, left: Any, right: Any) -> bool:
    """Whether a comparison is true: pytest explains those parts of an `and` as well."""
    try:
        return bool(HOLDS[op](left, right))
    except Exception:  # arrays have no single answer, and an operator may not be known
        return False


class Repairs(logging.Handler):
    """Keeps why steps have failed: the engine repairs them, and a test may not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        logging.getLogger("nanovllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if (said := record.getMessage()).startswith("a step failed"):
            self.seen.append(said)


class Events:
    """A plugin of pytest that writes what happens. Each line begins with a secret word, which the
    student's code is not told."""

    def __init__(self, job: dict[str, Any], package: Path, tests: list[str]):
        self.secret = job["secret"]
        self.limit = job["limit"]  # seconds of a test
        self.report = Path(job["report"])
        self.package = package
        self.tests = (*tests,)  # the names of the tests that run begin with one of these
        self.repairs = Repairs()

    def write(self, **event: Any) -> None:
        with self.report.open("a", encoding="utf-8") as file:
            file.write(f"{self.secret}{json.dumps(event)}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid.startswith(self.tests)]

    def too_long(self, *_: Any) -> None:
        raise TimeoutError(f"it still runs after {self.limit} s")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Ends a test that never returns, where the system can. Unless the test is about failures,
        no step may fail."""
        self.repairs.seen.clear()
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self.too_long)
            # again and again: hypothesis runs an example that fails once more
            signal.setitimer(signal.ITIMER_REAL, self.limit, self.limit)
        try:
            yield
        finally:
            if hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.repairs.seen and "recovery" not in item.nodeid and "fails" not in item.nodeid:
            raise AssertionError(f"{self.repairs.seen[0]}. The engine has repaired it")

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str]:
        if isinstance(left, dict) and isinstance(right, dict):
            others = [key for key in left if key in right and left[key] != right[key]]
            if others:
                left, right = ({key: one[key] for key in others} for one in (left, right))
        is_true = holds(op, left, right)
        left, right = short(repr(left)), short(repr(right))
        if is_true:
            return [f"{left} {op} {right} holds"]
        if op == "==":
            return [f"got {left}, expected {right}"]
        return [f"{left} {op} {right} does not hold"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = call.excinfo and call.excinfo.value
        if report.skipped and isinstance(error, BaseException) and place_of(error, self.package)[0]:
            says = f"your code skips the test: {problem_of(error, self.package)}"
            self.write(failed=item.nodeid, says=says)
        elif report.skipped:
            self.write(skipped=item.nodeid)
        elif report.failed and call.excinfo is not None:
            self.write(failed=item.nodeid, says=sentence(item, call.excinfo.value, self.package))
        elif report.when == "call":
            self.write(passed=item.nodeid)
        return report


def run(job: dict[str, Any], *options: str) -> None:
    """Imports the package in a folder, runs the tests, and measures what the milestone brings if all
    pass. `build.job_of` makes the job."""
    folder = Path(job["folder"])
    sys.path.insert(0, str(folder))
    tests = job["tests"]
    events = Events(job, folder / "nanovllm", tests)
    if not job["has_numba"]:  # a new package has no compiled kernels: PyTorch is faster
        sys.modules["numba"] = None  # type: ignore[assignment]
    try:
        for module in job["modules"]:
            importlib.import_module(module)
    except BaseException as error:  # a module may raise anything
        events.write(broken=f"your package does not load: {problem_of(error, events.package)}")
        return
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever is installed
    # a smaller example would take a minute, and is not shown
    settings.register_profile("check", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("check")
    names = dict.fromkeys(test.partition("[")[0] for test in tests)
    code = pytest.main([*QUIET, *options, *names], plugins=[events])
    gain = GAINS.get(job["milestone"])
    if code == 0 and gain is not None and not options and job["measures"]:
        try:
            events.write(gain=gain.measure())
        except Exception as error:
            events.write(broken=f"its gain: {problem_of(error, events.package)}")
    events.write(ended=True)


def run_each(jobs: list[dict[str, Any]]) -> None:
    """Runs one job after the other up to the first test that fails, each in a process that is forked
    off: what all need is imported once."""
    for name in (
        "hypothesis",
        "nanovllm.engine",
        "transformers.models.qwen3",
        "nanovllm.topics.simulator.simulation",
    ):
        importlib.import_module(name)
    for name in [*sys.modules]:
        if name.partition(".")[0] == "nanovllm":
            del sys.modules[name]
    gc.freeze()  # nothing of this is garbage
    for job in jobs:
        child = os.fork()
        if child == 0:
            run(job, "-x")
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    run(json.load(sys.stdin), *sys.argv[1:])
