"""Grades students' files: python -m tutorials.assignments.grade a1 my_scheduler.py [--json results.json]

Each check is a simulation or a run of the real engine, see `grader.py`. Needs Linux or macOS.
`--json` writes what Gradescope reads; with several files it is a folder. The grader trusts a file
not to forge its result.
"""

import argparse
import hashlib
import sys
from pathlib import Path

from tutorials.assignments.grader import LIMIT, Grader
from tutorials.assignments.report import Report
from tutorials.assignments.task import NAMES, PUBLIC_SEEDS, load_task


def secret_seeds(secret: str, name: str, count: int = 3) -> list[int]:
    """Seeds of 128 bits that only those can know who have the secret. Change it, and all loads are
    new."""
    digests = [hashlib.sha256(f"{secret}/{name}/{i}".encode()).hexdigest() for i in range(count)]
    return [int(digest[:32], 16) for digest in digests]


def new_grader(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Grader:
    """Ends the program with an error message if the options do not allow a grading."""
    module = f"tutorials.assignments.{args.task}.task"
    grader = Grader(load_task(args.task), module, [*PUBLIC_SEEDS], limit=args.limit)
    if not 1 <= args.limit <= 86_400:
        parser.error(f"--limit {args.limit} is not allowed: it must be from 1 to 86400 seconds")
    if args.secret:
        with sys.stdin as pipe:  # closed before a student's file runs
            secret = pipe.read().strip()
        if len(secret) < 16:
            parser.error("--secret needs 16 characters or more on standard input")
        grader.seeds, grader.is_secret = secret_seeds(secret, args.task), True
    return grader


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="students' files")
    parser.add_argument("--json", type=Path, help="write results.json here, or into this folder")
    help = "take the seeds from a secret, read from standard input"
    parser.add_argument("--secret", action="store_true", help=help)
    help = f"seconds of a processor for a simulation (default: {LIMIT})"
    parser.add_argument("--limit", type=int, default=LIMIT, help=help)
    args = parser.parse_intermixed_args(arguments)
    for path in args.paths:
        if not path.is_file():
            parser.error(f"path={str(path)!r} is not allowed: there is no such file")
    targets: list[Path | None] = [args.json]
    if len(args.paths) > 1 and args.json is not None:
        targets = [args.json / f"{path.stem}.json" for path in args.paths]
        if len({*targets}) < len(targets):
            parser.error("two of these files have the same name, and so would their results")
        try:
            args.json.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--json {args.json} is not allowed: {error.strerror}")
    sys.stdout.reconfigure(errors="backslashreplace")  # whatever a file is called or says
    grader = new_grader(parser, args)
    try:
        for path, target in zip(args.paths, targets * len(args.paths)):
            if len(args.paths) > 1:
                print(f"--- {path}", flush=True)
            grade_file(grader, path, target)
    except KeyboardInterrupt:
        raise SystemExit("interrupted: what has no line above was not graded") from None


def grade_file(grader: Grader, path: Path, target: Path | None) -> Report:
    report, num_shown = Report(), 0
    write(report, target)
    for report in grader.grade(path):
        for line in report.lines()[num_shown:]:
            print(line, flush=True)
        num_shown = len(report.checks)
        write(report, target)
    print(report.last_line(), flush=True)
    if report.printed:
        print(f"--- what your file has printed last ---\n{report.printed}", file=sys.stderr)
    return report


def write(report: Report, target: Path | None) -> None:
    """If the file cannot be written, an error message says so, and the grading goes on."""
    if target is None:
        return
    try:
        report.write(target)
    except OSError as error:
        print(f"{target} was not written: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    main()
