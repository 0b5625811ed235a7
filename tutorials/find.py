"""Find it: an engine with a fault of a kind that a real engine had. You find it from a user's report.

python -m tutorials.find new my_case 3     the engine with the fault of case 3, and the report
python -m tutorials.find hint my_case      the next of three hints
python -m tutorials.find check my_case     your test, and your repair

Works in a clone of the repository: the tests are not installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorials.build import PACKAGE, ROOT, Result, job_of, result_of, start, wait
from tutorials.building.milestones import Milestone
from tutorials.exercises.checks.expect import Wrong, expect
from tutorials.finding.cases import ANSWERS, NUMBERS, Case, case_of

LIMIT = 600.0  # seconds of the student's test on one engine
LIMIT_OF_TESTS = 1800.0  # of the engine's own
NOT_COPIED = shutil.ignore_patterns("*.pyc")  # compiled kernels are copied
TEST = "test_found.py"
HINTS = "HINTS.md"  # those that were asked for
TEXTS = Path(__file__).with_name("finding")
PYTEST = "[pytest]\npythonpath = .\naddopts = -p no:cacheprovider\n"  # the engine of the folder


def new(folder: Path, case: Case) -> None:
    """Writes the engine with the fault, the report and an empty diary."""
    shutil.copytree(PACKAGE, folder / "nanovllm", ignore=NOT_COPIED)
    put(folder, case, case.faults[0])
    shutil.copy(ROOT / "example.py", folder)
    (folder / "REPORT.md").write_text(case.report, encoding="utf-8")
    shutil.copy(TEXTS / "DIARY.md", folder)
    readme = (TEXTS / "FOLDER.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(readme.replace("FOLDER", f"{folder}"), encoding="utf-8")
    (folder / "pytest.ini").write_text(PYTEST, encoding="utf-8")


def put(folder: Path, case: Case, fault: str | None) -> None:
    """Makes the module of the case ours, or ours with a fault. Its date stays that of our file."""
    ours, path = PACKAGE / case.module, folder / "nanovllm" / case.module
    shutil.copy2(ours, path)
    if fault is not None:
        path.write_text(case.source(PACKAGE, fault), encoding="utf-8")
        shutil.copystat(ours, path)


def case_in(folder: Path) -> Case:
    report = (folder / "REPORT.md").read_text(encoding="utf-8")
    match = re.match(r"# Case (\d+)", report)
    if match is None:
        raise ValueError(f"{folder / 'REPORT.md'} must begin with '# Case' and its number")
    return case_of(int(match[1]))


def hint(folder: Path) -> str:
    """The next hint, which the folder keeps."""
    hints = case_in(folder).hints
    path = folder / HINTS
    known = path.read_text(encoding="utf-8") if path.is_file() else ""
    number = known.count("# Hint")
    if number == len(hints):
        return f"there are no more hints: all {number} are in {path}"
    said = f"# Hint {number + 1}\n\n{hints[number]}\n"
    path.write_text(f"{known}\n{said}".lstrip(), encoding="utf-8")
    return said


def run_test(folder: Path) -> tuple[int, str]:
    """0 if the student's test passes on the engine of a folder, 1 if it fails, and more if it does
    not run; and the end of what it prints."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--tb=short", TEST]
    # no files with bytecode: several engines have a file of the same date and size
    env = os.environ | {"PYTHONPATH": f"{folder}", "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, cwd=folder, env=env, timeout=LIMIT, check=False, **quiet)
    except subprocess.TimeoutExpired:
        return 1, f"it still runs after {LIMIT:g} s"
    return done.returncode, "\n".join(done.stdout.strip().splitlines()[-12:])


def check_test(folder: Path, case: Case) -> Iterator[str]:
    """Tries the test on the faulty engine, on the right one, and on other faults of the function."""
    (folder / "pytest.ini").write_text(PYTEST, encoding="utf-8")
    put(folder, case, case.faults[0])
    status, said = run_test(folder)
    expect(status <= 1, f"your test does not run\n{said}")
    expect(status == 1, "on the engine with the fault, your test passes: it must fail")
    yield "on the engine with the fault, your test fails: right"
    put(folder, case, None)
    status, said = run_test(folder)
    expect(status == 0, f"on the right engine, your test fails: it must pass\n{said}")
    yield "on the right engine, your test passes: right"
    found = 0
    for fault in case.faults[1:]:
        put(folder, case, fault)
        found += run_test(folder)[0] != 0
    yield f"your test also finds {found} of {len(case.faults) - 1} other faults of this function"


def check_engine(folder: Path, case: Case) -> Iterator[str]:
    """Runs the test and the engine's own tests of the module on the student's engine."""
    status, said = run_test(folder)
    expect(status == 0, f"on your engine, your test fails: the fault is still there\n{said}")
    yield "on your engine, your test passes: right"
    milestone = Milestone(0, "find", "09", False, {}, [])
    job = job_of(milestone, folder, folder / "report") | {"tests": case.tests}
    result: Result = result_of(milestone, [], job, wait(start(job), job, LIMIT_OF_TESTS))
    num_passed, num_tests = len(result.passed), len(result.collected)
    yield f"the engine's tests of this module: {num_passed} of {num_tests} pass on your engine"
    problem = next(iter(result.problems.values()), result.broken)
    expect(result.is_right, f"first: {problem}")


def check(folder: Path) -> Iterator[str]:
    """What to say of test and repair, one line after the other. Raises Wrong."""
    case = case_in(folder)
    has_test = (folder / TEST).is_file()
    expect(has_test, f"there is no {folder / TEST}: write a test that fails on this engine")
    with TemporaryDirectory() as place:
        target = Path(place).resolve()
        shutil.copytree(PACKAGE, target / "nanovllm", ignore=NOT_COPIED)
        shutil.copy(folder / TEST, target)
        shutil.copy(ROOT / "example.py", target)
        yield from check_test(target, case)
        shutil.rmtree(target / "nanovllm")
        shutil.copytree(folder / "nanovllm", target / "nanovllm", ignore=NOT_COPIED)
        yield from check_engine(target, case)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("new", help="write an engine with a fault into a new folder")
    making.add_argument("folder", type=Path)
    making.add_argument("case", type=int, choices=NUMBERS)
    for name, what in (("hint", "the next hint"), ("check", "try your test and your engine")):
        commands.add_parser(name, help=what).add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    if not ANSWERS.is_dir():
        parser.error(f"there is no {ANSWERS.relative_to(ROOT)}: ask your lecturer for a case")
    if args.command == "new":
        if args.folder.exists():
            parser.error(f"there is already {args.folder}: choose a new folder")
        new(args.folder, case_of(args.case))
        print(f"now: read {args.folder / 'REPORT.md'}")
        return 0
    if not (args.folder / "REPORT.md").is_file():
        parser.error(f"{args.folder} has no REPORT.md: make a case with `new`")
    if args.command == "hint":
        print(hint(args.folder))
        return 0
    print("six runs of your test, then the engine's tests ...", flush=True)
    try:
        for line in check(args.folder):
            print(line, flush=True)
    except Wrong as wrong:
        print(wrong)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
