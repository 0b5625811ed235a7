"""Grades students' files: python -m tutorials.assignments.grade a1 my_scheduler.py [--json results.json]

Each check is a simulation or a run of the real engine, see `grader.py`. Needs Linux or macOS.
`--json` writes what Gradescope reads; with several files it is a folder.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tutorials.assignments.grader import LIMIT, Grader
from tutorials.assignments.report import Report
from tutorials.assignments.task import NAMES, PUBLIC_SEEDS, load_task


def secret_seeds(secret: str, name: str, count: int = 3) -> list[int]:
    """Seeds of 128 bits that only those can know who have the secret. Change it, and all loads are
    new."""
    digests = [hashlib.sha256(f"{secret}/{name}/{i}".encode()).hexdigest() for i in range(count)]
    return [int(digest[:32], 16) for digest in digests]


def read_secret(path: Path) -> str:
    """Raises ValueError for a secret that is none."""
    if not path.is_file():
        raise ValueError("there is no such file")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"others can read it: chmod 600 {path}")
    secret = path.read_text(encoding="utf-8").strip()
    if len(secret) < 16:
        raise ValueError("it has fewer than 16 characters: somebody could guess it")
    return secret


def new_grader(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Grader:
    """Ends the program with an error message if the options do not allow a grading."""
    grader = Grader(load_task(args.task), list(PUBLIC_SEEDS), limit=args.limit)
    if not 1 <= args.limit <= 86_400:
        parser.error(f"--limit {args.limit:g} is not allowed: it must be from 1 to 86400 seconds")
    if args.secret is not None:
        try:
            grader.seeds = secret_seeds(read_secret(args.secret), args.task)
        except (ValueError, OSError) as error:
            parser.error(f"--secret {args.secret} is not allowed: {error}")
        grader.is_secret = True
    return grader


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE", help="students' files")
    parser.add_argument("--json", type=Path, help="write results.json here, or into this folder")
    parser.add_argument("--secret", type=Path, help="a file with a secret, which gives the seeds")
    help = f"seconds of a processor for a file (default: {LIMIT:g})"
    parser.add_argument("--limit", type=float, default=LIMIT, help=help)
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
    with interruptible():
        for path, target in zip(args.paths, targets * len(args.paths)):
            if len(args.paths) > 1:
                print(f"--- {path}", flush=True)
            grade_file(grader, path, target)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the program with a message."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("interrupted: what has no line above was not graded") from None


def grade_file(grader: Grader, path: Path, target: Path | None) -> None:
    def on_check(report: Report) -> None:
        print(report.lines()[-1], flush=True)
        write(report, target)

    write(Report(), target)
    grader.on_check = on_check
    report = grader.grade(path)
    print(report.last_line(), flush=True)
    if report.printed:
        print(f"--- what your file has printed last ---\n{report.printed}", file=sys.stderr)


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
