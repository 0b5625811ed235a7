"""Build it: the engine with holes, which you fill. The engine's own tests check what you wrote.

python -m tutorials.build new my_engine            the whole engine, without the bodies of its functions
python -m tutorials.build new my_engine --only 2   holes in milestone 2 only
python -m tutorials.build next my_engine           what is done, and what to do now: or next my_engine 7
python -m tutorials.build check my_engine 2        tests milestone 2; the other milestones may be open
python -m tutorials.build check my_engine 10       tests the engine that is all your own

Works in a clone of the repository: the tests are not installed.
"""

import argparse
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorials.assignments.report import Report
from tutorials.building.gains import GAINS
from tutorials.building.holes import filled, functions, open_holes, statements, with_holes
from tutorials.building.milestones import MILESTONES, POINTS, Group, Milestone, title_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
LIMIT = 1800.0  # seconds for a milestone, on a slow laptop, and for the last one, too
LIMIT_OF_A_TEST = 60  # seconds
MOST = 5  # failed tests whose names are printed
NOT_COPIED = shutil.ignore_patterns("__pycache__")
DONE = "done.txt"  # in the student's folder: the milestones that are right
CHECKED = "checked.json"  # there, too: the last check that all tests passed
ENDED = "your code has ended Python (os._exit, sys.exit or pytest.exit)"
README = """This is nanovllm without the bodies of its functions. You write them, milestone by milestone.

    python -m tutorials.build next {folder}
    python -m tutorials.build check {folder} 1

Run both in the root of the repository. `next` says which file and functions come now, and what to
read; `next {folder} 7` says it of another milestone: any order will do. `check` tests what you
wrote, in some minutes, and prints the first problem. With `--guess N` it also tells how near your
guess was. The docstrings say what a function does; the chapters say why. You may add functions and
files. Milestones that are right are listed in done.txt. At the end, `python example.py` in this
folder runs on your code alone.
"""


def new(folder: Path, only: int | None = None) -> None:
    """Writes a copy of the engine with holes."""
    shutil.copytree(PACKAGE, folder / "nanovllm", ignore=NOT_COPIED)
    shutil.copy(ROOT / "example.py", folder)
    (folder / "README.md").write_text(README.format(folder=folder), encoding="utf-8")
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


def differs(folder: Path, module: str) -> bool:
    """Whether this file is not as in our package, or not there."""
    path = folder / "nanovllm" / module
    return not path.is_file() or path.read_bytes() != (PACKAGE / module).read_bytes()


def assemble(folder: Path, milestone: Milestone, target: Path) -> list[str]:
    """Copies the student's package. A file of another milestone that has open holes is ours. In a
    file that both have holes in, the open functions of the other are ours. Returns the other files
    that are the student's: they differ from ours, and have no holes."""
    own = []
    shutil.copytree(folder / "nanovllm", target / "nanovllm", ignore=NOT_COPIED)
    for other in MILESTONES:
        if not milestone.is_last and other is not milestone:
            for module, names in other.holes.items():
                path, ours = target / "nanovllm" / module, PACKAGE / module
                found = holes_in(path)
                if module in milestone.holes:
                    if missing := {*names}.intersection(found or ()):
                        path.write_text(filled(path, missing, ours), encoding="utf-8")
                elif found != []:
                    shutil.copy(ours, path)
                elif differs(target, module):
                    own.append(module)
    return [*dict.fromkeys(own)]


@dataclass
class Result:
    """What the tests of a milestone say."""

    milestone: Milestone
    open: list[str]  # holes
    collected: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # of each test that fails
    passed: set[str] = field(default_factory=set)
    num_skipped: int = 0
    broken: str = ""  # why no test ran, or not all of them
    gain: list[float] | None = None  # without the milestone, and with it
    others: list[str] = field(default_factory=list)  # the student's files of other milestones
    culprits: list[str] = field(default_factory=list)  # with ours instead, what failed passes

    @property
    def is_right(self) -> bool:
        return 0 < len(self.passed) == len(self.collected) and not self.broken and self.has_gain

    @property
    def has_gain(self) -> bool:
        """Whether the number is as good as it must be, if there is one."""
        return self.gain is None or (
            self.gain[1] <= GAINS[self.milestone.number].share * self.gain[0]
        )

    def first_problem(self) -> tuple[str, Group]:
        for test, problem in self.problems.items():
            return problem, self.milestone.group_of(test)
        if not self.broken and not self.has_gain:
            return "all tests pass, but the gain is not there", self.milestone.groups[0]
        return self.broken, self.milestone.groups[0]

    def expect(self, ours: "Result") -> None:
        """With our own package, these tests are there. A report with others is not the tests'."""
        names = [test for test in self.collected if test not in ours.collected]
        missing = len(ours.collected) - len(self.collected) - self.num_skipped
        if names and not self.broken:
            self.broken = f"no such test: {names[0]}"
        elif missing > 0 and not self.broken:
            self.broken = f"{missing} tests did not run, which run with our package"

    def lines(self, guess: float | None = None) -> list[str]:
        """What a student reads."""
        name = f"milestone {self.milestone.number}, {self.milestone.name}"
        lines = [f"{name}: {len(self.passed)} of {len(self.collected)} tests pass"]
        if self.others:
            lines.append(f"with your {', '.join(self.others)}")
        if self.gain is not None:
            shown = guess if self.has_gain else 0.0 if guess is None else guess
            lines += GAINS[self.milestone.number].lines(*self.gain, shown)
        if self.is_right:
            return lines
        if self.open:
            lines.append(f"still open: {', '.join(self.open)}")
        problem, group = self.first_problem()
        lines.append(f"first: {problem}")
        if self.milestone.is_last and self.problems:
            lines.append(f"in: {group.name}")
        for culprit in self.culprits:
            lines.append(f"with our {culprit} this test passes: look there")
        lines.append(f"read: tutorials/{group.section}")
        first, *named = [test for test in self.problems if not test.endswith("::runTest")] or [""]
        others = dict.fromkeys(map(title_of, named))
        others.pop(title_of(first), None)
        if others:
            more = f"; and {len(others) - MOST} more" if len(others) > MOST else ""
            lines.append(f"these fail, too: {'; '.join([*others][:MOST])}{more}")
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
        others = assemble(folder, milestone, target)
        own = MILESTONES if milestone.is_last else [milestone]
        names = dict.fromkeys(module for one in own for module in one.holes)
        modules = [target / "nanovllm" / name for name in names]
        found = [
            f"{name} in {module.relative_to(target / 'nanovllm').as_posix()}"
            for module in modules
            for name in holes_in(module) or []
        ]
        (ours := target / "ours").mkdir()
        (ours / "nanovllm").symlink_to(PACKAGE)
        counted = job_of(milestone, ours, target / "expected")
        counting = start(counted, "--collect-only")
        job = job_of(milestone, target, target / "report")
        result = result_of(milestone, found, job, wait(start(job), job, limit))
        wait(counting, counted, limit)
        result.expect(result_of(milestone, [], counted, ""))
        result.others = others
        if result.problems and others:
            result.culprits = culprits(milestone, target, [*result.problems][:1], others, limit)
        return result


def culprits(
    milestone: Milestone, target: Path, tests: list[str], others: list[str], limit: float
) -> list[str]:
    """The student's files of other milestones which, replaced by ours, let the tests pass."""

    def passes(modules: list[str]) -> bool:
        for module in others:
            source = PACKAGE if module in modules else target / "theirs"
            shutil.copy(source / module, target / "nanovllm" / module)
        job = job_of(milestone, target, target / f"again {'_'.join(modules)}".replace("/", "."))
        job |= {"tests": tests, "measures": False}
        return result_of(milestone, [], job, wait(start(job), job, limit)).is_right

    shutil.copytree(target / "nanovllm", target / "theirs", ignore=NOT_COPIED)
    if not passes(others):
        return []
    return [module for module in others if len(others) == 1 or passes([module])]


def job_of(milestone: Milestone, target: Path, report: Path) -> dict:
    """What the process with the tests is told: see building/run.py."""
    names = [module.removesuffix(".py").replace("/", ".") for module in milestone.holes]
    modules = [f"nanovllm.{name}" for name in names] or ["nanovllm.engine"]
    job = {"folder": f"{target}", "report": f"{report}", "secret": secrets.token_hex()}
    job |= {"modules": modules, "tests": milestone.tests, "has_numba": milestone.has_numba}
    return job | {"milestone": milestone.number, "measures": True, "limit": LIMIT_OF_A_TEST}


def start(job: dict, *options: str) -> subprocess.Popen:
    """Starts a process with the tests. It is told the job by a pipe, which is empty before the
    student's code runs."""
    command = [sys.executable, "-m", "tutorials.building.run", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HYPOTHESIS_STORAGE_DIRECTORY": job["folder"]}
    with Path(f"{job['report']} errors").open("w", encoding="utf-8") as errors:
        quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **quiet)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(job))
    return process


def wait(process: subprocess.Popen, job: dict, limit: float) -> str:
    """Waits for the end of the tests. Returns why they did not come to an end, or nothing."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"still runs after {limit:g} s"
    if code < 0:
        return (
            "your code has crashed Python. Is an index outside of an array? Set NUMBA_DISABLE_JIT=1"
        )
    said = Path(f"{job['report']} errors").read_text(encoding="utf-8").strip().splitlines()
    return ": ".join([ENDED, *said[-1:]]) if code else ""


def result_of(milestone: Milestone, still_open: list[str], job: dict, problem: str) -> Result:
    """Reads what the process has written, line by line. Lines without the secret are not its own."""
    result = Result(milestone, still_open)
    report, secret = Path(job["report"]), job["secret"]
    text = report.read_text(encoding="utf-8") if report.is_file() else ""
    started, has_ended = "", False
    lines = [line for line in text.splitlines() if line.startswith(secret)]
    for event in (json.loads(line.removeprefix(secret)) for line in lines):
        has_ended = has_ended or "ended" in event or "broken" in event
        result.gain = event.get("gain", result.gain)
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
            result.num_skipped += 1
    if not has_ended and not problem:
        problem = ENDED
    if problem:
        result.broken = problem
        if started:
            result.broken = result.problems[started] = f"{title_of(started)}: {problem}"
    if not result.collected and not result.broken:
        result.broken = "no test ran: is this a clone of the repository, with pytest installed?"
    return result


def is_students(folder: Path, milestone: Milestone) -> bool:
    """Whether a file of the milestone differs from ours: with `--only`, most do not."""
    return milestone.is_last or any(differs(folder, module) for module in milestone.holes)


def advice(folder: Path, number: int | None = None) -> list[str]:
    """What is done, and the milestone that comes now, or the one with this number."""
    done = done_in(folder)
    names = [f"{one.number} {one.name}" for one in MILESTONES if one.number in done]
    lines = [f"done: {', '.join(names) or 'nothing yet'}"]
    todo = [one for one in MILESTONES if one.number not in done and is_students(folder, one)]
    if number is None and not todo:
        return [*lines, "next: the final project, in tutorials/course.md"]
    milestone, minutes = todo[0] if number is None else MILESTONES[number - 1], 0
    lines.append(f"next: {milestone.number} {milestone.name}, chapter {milestone.chapter}")
    for module, names in milestone.holes.items():
        lines.append(f"write, in {folder}/nanovllm/{module}: {', '.join(names)}")
        known = functions((PACKAGE / module).read_text(encoding="utf-8"))
        bodies = [statements(known[name]) for name in names]
        minutes += sum(3 * (body[-1].end_lineno or 0) - 3 * body[0].lineno + 3 for body in bodies)
    sections = dict.fromkeys(group.section for group in milestone.groups)
    if not milestone.is_last:
        lines.append(f"read: {', '.join(f'tutorials/{section}' for section in sections)}")
        lines.append(f"about {max(1, round(minutes / 60))} hours, if a line takes three minutes")
    guess = ""
    if gain := GAINS.get(milestone.number):
        lines.append(f"guess: {gain.question} How many {gain.unit} with your code?")
        guess = " --guess N"
    command = f"python -m tutorials.build check {folder} {milestone.number}{guess}"
    return [*lines, f"then: {command}"]


def done_in(folder: Path) -> set[int]:
    """The milestones whose check has passed."""
    path = folder / DONE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {int(match[1]) for line in lines if (match := re.match(r"(\d+) ", line))}


def note(folder: Path, milestone: Milestone, is_right: bool) -> None:
    """Keeps in the folder what is done."""
    done = done_in(folder) - {milestone.number} | ({milestone.number} if is_right else set())
    lines = [f"{one.number} {one.name}\n" for one in MILESTONES if one.number in done]
    (folder / DONE).write_text("".join(lines), encoding="utf-8")


def digest_of(folder: Path) -> str:
    """Of the student's package, of ours and of the tests."""
    roots = folder / "nanovllm", PACKAGE, ROOT / "tests"
    files = [path.read_bytes() for root in roots for path in sorted(root.rglob("*.py"))]
    return hashlib.sha256(b"".join(files)).hexdigest()


def keep(folder: Path, result: Result) -> None:
    """Keeps a check that all tests passed: a guess may come later."""
    known = {"digest": digest_of(folder), "number": result.milestone.number}
    known |= {"collected": result.collected, "gain": result.gain, "others": result.others}
    (folder / CHECKED).write_text(json.dumps(known), encoding="utf-8")


def kept(folder: Path, milestone: Milestone) -> Result | None:
    """The last check, if it was of this milestone, and no file has changed since."""
    path = folder / CHECKED
    known = json.loads(path.read_bytes()) if path.is_file() else {}
    if (known.get("number"), known.get("digest")) != (milestone.number, digest_of(folder)):
        return None
    collected = known["collected"]
    more = {"passed": {*collected}, "gain": known["gain"], "others": known["others"]}
    return Result(milestone, [], collected, **more)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    numbers = [milestone.number for milestone in MILESTONES]
    making = commands.add_parser("new", help="write the engine with holes into a new folder")
    making.add_argument("folder", type=Path)
    making.add_argument("--only", type=int, choices=numbers[:-1], help="one milestone")
    going_on = commands.add_parser("next", help="what is done, and what to do now")
    going_on.add_argument("folder", type=Path)
    going_on.add_argument("milestone", type=int, nargs="?", choices=numbers)
    checking = commands.add_parser("check", help="test a milestone")
    checking.add_argument("folder", type=Path)
    checking.add_argument("milestone", type=int, choices=numbers)
    checking.add_argument("--points", action="store_true", help="points, as JSON for Gradescope")
    checking.add_argument("--guess", type=float, help="the number that your code will have")
    checking.add_argument("--limit", type=float, default=LIMIT, help="seconds")
    args = parser.parse_args(arguments)
    if args.command == "new" and args.folder.exists():
        parser.error(f"there is already {args.folder}: choose a new folder")
    if args.command != "new" and not (args.folder / "nanovllm").is_dir():
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
                where = f"chapter {milestone.chapter}  {what}  {' '.join(milestone.holes)}"
                print(f"{milestone.number:2} {milestone.name:18} {where}".rstrip())
        print(f"now: python -m tutorials.build next {args.folder}")
        return 0
    if args.command == "next":
        print("\n".join(advice(args.folder, args.milestone)))
        return 0
    milestone = MILESTONES[args.milestone - 1]
    is_guess = args.guess is not None and not args.points
    result = kept(args.folder, milestone) if is_guess else None
    if result is None:
        result = check(args.folder, milestone, args.limit)
        if 0 < len(result.passed) == len(result.collected) and not result.broken:
            keep(args.folder, result)
    note(args.folder, milestone, result.is_right and is_students(args.folder, milestone))
    if args.points:
        print(json.dumps(result.points().results(), indent=1))
    else:
        print("\n".join(result.lines(args.guess)))
    return int(not result.is_right)


if __name__ == "__main__":
    sys.exit(main())
