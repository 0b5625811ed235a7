"""Build it: the engine with holes, which you fill. The engine's own tests check what you wrote.

python -m tutorials.build new my_engine            the whole engine, without the bodies of its functions
python -m tutorials.build new my_engine --only 2   holes in milestone 2 only
python -m tutorials.build check my_engine 2        tests milestone 2; the other milestones may be open
python -m tutorials.build check my_engine 10       tests the engine that is all your own

Works in a clone of the repository: the tests are not installed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorials.assignments.report import Report
from tutorials.building.holes import open_holes, with_holes
from tutorials.building.milestones import MILESTONES, POINTS, Group, Milestone, title_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
LIMIT = 600.0  # seconds for a milestone, on a slow laptop, too
MOST = 5  # failed tests whose names are printed
NOT_COPIED = shutil.ignore_patterns("__pycache__")


def new(folder: Path, only: int | None = None) -> None:
    """Writes a copy of the engine with holes."""
    shutil.copytree(PACKAGE, folder / "nanovllm", ignore=NOT_COPIED)
    shutil.copy(ROOT / "example.py", folder)
    for milestone in MILESTONES:
        if only in (None, milestone.number):
            for module, names in milestone.holes.items():
                path = folder / "nanovllm" / module
                source = path.read_text(encoding="utf-8")
                holes = with_holes(source, names, milestone.message)
                path.write_text(holes, encoding="utf-8")


def holes_in(path: Path) -> list[str] | None:
    """The open holes of a file; None if it has no valid Python, or is not there."""
    try:
        return open_holes(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def assemble(folder: Path, milestone: Milestone, target: Path) -> None:
    """Copies the student's package. A file of another milestone that has open holes is ours."""
    shutil.copytree(folder / "nanovllm", target / "nanovllm", ignore=NOT_COPIED)
    for other in MILESTONES:
        if milestone.holes and other is not milestone:
            for module in other.holes:
                if holes_in(target / "nanovllm" / module) != []:
                    shutil.copy(PACKAGE / module, target / "nanovllm" / module)


@dataclass
class Result:
    """What the tests of a milestone say."""

    milestone: Milestone
    open: list[str]  # holes
    collected: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # of each test that fails
    passed: set[str] = field(default_factory=set)
    broken: str = ""  # why no test ran, or not all of them

    @property
    def is_right(self) -> bool:
        return 0 < len(self.passed) == len(self.collected) and not self.broken

    def first_problem(self) -> tuple[str, Group]:
        for test, problem in self.problems.items():
            return problem, self.milestone.group_of(test)
        return self.broken, self.milestone.groups[0]

    def lines(self) -> list[str]:
        """What a student reads."""
        name = f"milestone {self.milestone.number}, {self.milestone.name}"
        lines = [f"{name}: {len(self.passed)} of {len(self.collected)} tests pass"]
        if self.is_right:
            return lines
        if self.open:
            lines.append(f"still open: {', '.join(self.open)}")
        problem, group = self.first_problem()
        lines.append(f"first: {problem}")
        lines.append(f"read: tutorials/{group.section}")
        named = [test for test in [*self.problems][1:] if not test.endswith("::runTest")]
        others = dict.fromkeys(map(title_of, named))
        if others:
            lines.append(f"these fail, too: {'; '.join([*others][:MOST])}")
        return lines

    def points(self) -> Report:
        """The points of each group of tests, in the form of the assignments' grader."""
        report = Report()
        total = Counter(self.milestone.group_of(test).name for test in self.collected)
        right = Counter(self.milestone.group_of(test).name for test in self.passed)
        for group in self.milestone.groups:
            said = [
                text
                for test, text in self.problems.items()
                if self.milestone.group_of(test) is group
            ]
            share = right[group.name] / total[group.name] if total[group.name] else 0.0
            output = (said or [self.broken or "all pass"])[0]
            report.add(group.name, share * POINTS, POINTS, output)
        return report


def check(folder: Path, milestone: Milestone, limit: float = LIMIT) -> Result:
    """Runs the tests of a milestone against the student's files."""
    with TemporaryDirectory() as place:
        target = Path(place).resolve()
        assemble(folder, milestone, target)
        own = [milestone] if milestone.holes else MILESTONES
        modules = [target / "nanovllm" / module for one in own for module in one.holes]
        found = [
            f"{name} in {module.relative_to(target / 'nanovllm').as_posix()}"
            for module in modules
            for name in holes_in(module) or []
        ]
        report = target / "report"
        problem = run_tests(milestone, target, report, limit)
        return result_of(milestone, found, report, problem)


def job_of(milestone: Milestone, target: Path, report: Path) -> dict:
    """What the process with the tests is told: see building/run.py."""
    names = [module.removesuffix(".py").replace("/", ".") for module in milestone.holes]
    modules = [f"nanovllm.{name}" for name in names] or ["nanovllm.engine"]
    paths = {"folder": f"{target}", "report": f"{report}"}
    return paths | {"modules": modules, "tests": milestone.tests, "has_numba": milestone.has_numba}


def run_tests(milestone: Milestone, target: Path, report: Path, limit: float) -> str:
    """Runs the tests in a process. Returns why it did not come to an end, or nothing."""
    job = json.dumps(job_of(milestone, target, report))
    command = [sys.executable, "-m", "tutorials.building.run", job]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": f"{target}"}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    try:
        ended = subprocess.run(command, cwd=ROOT, env=env, timeout=limit, text=True, **quiet)
    except subprocess.TimeoutExpired:
        return f"still runs after {limit:g} s"
    if ended.returncode < 0:
        return (
            "your code has crashed Python. Is an index outside of an array? Set NUMBA_DISABLE_JIT=1"
        )
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return "" if ended.returncode == 0 else f"the process with the tests has ended: {last}"


def result_of(milestone: Milestone, still_open: list[str], report: Path, problem: str) -> Result:
    """Reads what the process has written, line by line."""
    result = Result(milestone, still_open)
    text = report.read_text(encoding="utf-8") if report.is_file() else ""
    started = ""
    for event in map(json.loads, text.splitlines()):
        result.collected = event.get("collected", result.collected)
        started = event.get("started", started)
        result.broken = event.get("broken", result.broken)
        if "passed" in event:
            result.passed.add(event["passed"])
        if "failed" in event:
            result.passed.discard(event["failed"])
            result.problems.setdefault(event["failed"], event["says"])
        if "skipped" in event:
            result.collected.remove(event["skipped"])
    if problem:
        result.broken = problem
        if started:
            result.broken = result.problems[started] = f"{title_of(started)}: {problem}"
    if not result.collected and not result.broken:
        result.broken = "no test ran: is this a clone of the repository, with pytest installed?"
    return result


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    numbers = [milestone.number for milestone in MILESTONES]
    making = commands.add_parser("new", help="write the engine with holes into a new folder")
    making.add_argument("folder", type=Path)
    making.add_argument("--only", type=int, choices=numbers[:-1], help="one milestone")
    checking = commands.add_parser("check", help="test a milestone")
    checking.add_argument("folder", type=Path)
    checking.add_argument("milestone", type=int, choices=numbers)
    checking.add_argument("--points", action="store_true", help="points, as JSON for Gradescope")
    checking.add_argument("--limit", type=float, default=LIMIT, help="seconds")
    args = parser.parse_args(arguments)
    args.folder = args.folder.resolve()
    if args.command == "new" and args.folder.exists():
        parser.error(f"there is already {args.folder}: choose a new folder")
    if args.command == "check" and not (args.folder / "nanovllm").is_dir():
        parser.error(f"{args.folder} has no package nanovllm: make one with `new`")
    if not (ROOT / "tests").is_dir():
        parser.error("this works in a clone of the repository: the tests are not installed")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    if args.command == "new":
        new(args.folder, args.only)
        for milestone in MILESTONES:
            if args.only in (None, milestone.number):
                num_holes = sum(map(len, milestone.holes.values()))
                what = f"{num_holes:2} functions" if num_holes else "all of it"
                print(
                    f"{milestone.number:2} {milestone.name:18} chapter {milestone.chapter}  {what}"
                )
        return 0
    result = check(args.folder, MILESTONES[args.milestone - 1], args.limit)
    if args.points:
        print(json.dumps(result.points().results(), indent=1))
    else:
        print("\n".join(result.lines()))
    return int(not result.is_right)


if __name__ == "__main__":
    sys.exit(main())
