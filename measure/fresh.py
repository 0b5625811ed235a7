"""Grades the reference solutions on secrets that are new each time, through the command.

    python -m measure.fresh --count 20 --json tutorials/results/fresh_secrets.json
    python -m measure.fresh a1 --count 3

For an author who has changed a load or a goal: a solution that loses points on some secret asks
more of students than is possible. The secrets are not written down.
"""

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorials.arguments import experiment, positive
from tutorials.assignments.task import NAMES
from tutorials.machine import ROOT, environment, installed
from tutorials.report import aligned, write_json

SOLUTIONS = ROOT / "tests" / "course" / "solutions"


def graded(name: str) -> dict:
    """What Gradescope would read, of the solution of this assignment with a new secret."""
    with TemporaryDirectory() as folder:
        secret, report = Path(folder, "secret"), Path(folder, "results.json")
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(), encoding="utf-8")
        command = [sys.executable, "-m", "tutorials.assignments.grade", name]
        options = ["--secret", str(secret), "--json", str(report)]
        solution = SOLUTIONS / f"{name}_solution.py"
        subprocess.run(
            [*command, str(solution), *options], cwd=ROOT, check=True, capture_output=True
        )
        return json.loads(report.read_bytes())


def points_of(report: dict) -> tuple[float, float]:
    """The points that were reached, and the points that are possible."""
    checks = report["tests"]
    return sum(check["score"] for check in checks), sum(check["max_score"] for check in checks)


def lost(report: dict) -> list[str]:
    """The checks that did not give all points, with what they say."""
    return [
        f"{check['name']}: {check['output']}"
        for check in report["tests"]
        if check["score"] < check["max_score"]
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = experiment(__doc__, "write the points to this file; other assignments in it stay")
    parser.add_argument("names", nargs="*", help="of assignments (default: all)")
    parser.add_argument("--count", type=positive, default=20, help="how many secrets (default: 20)")
    args = parser.parse_args(argv)
    unknown = {*args.names} - {*NAMES}
    if unknown:
        parser.error(f"{min(unknown)!r} is not allowed: choose from {', '.join(NAMES)}")
    rows = [["assignment", "secrets", "points, at least", "of"]]
    report = environment() | {"device": "simulated", "assignments": {}}
    report["versions"] = {"torch": installed("torch")}  # of the check with the real engine
    if args.json and args.json.exists():
        report["assignments"] = json.loads(args.json.read_bytes())["assignments"]
    for name in args.names or NAMES:
        reports = [graded(name) for _ in range(args.count)]
        points, (most, *_) = zip(*map(points_of, reports))
        for sentence in (sentence for one in reports for sentence in lost(one)):
            print(f"{name}: {sentence}", file=sys.stderr)
        rows.append([name, str(args.count), f"{min(points):g}", f"{most:g}"])
        commit = report["commit"]
        report["assignments"][name] = {"points": points, "of": most, "commit": commit}
        print(*rows[-1], flush=True)
    print(aligned(rows))
    write_json(report, args.json)


if __name__ == "__main__":
    main()
