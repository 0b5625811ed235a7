"""The leaderboard of assignment 7: python -m tutorials.assignments.leaderboard my_scheduler.py --name "Cheapest first"

Grades the file, and writes or replaces the line of this name in a7/LEADERBOARD.md. With `--secret
FILE`, the instructor's seeds are used, and the line is marked as verified. The other options are
those of grade.py."""

import argparse
from dataclasses import replace
from datetime import date
from pathlib import Path

from tutorials.assignments.grade import add_options, check_path, interruptible, new_grader
from tutorials.assignments.report import Report, write_whole
from tutorials.assignments.task import Task

PAGE = Path(__file__).with_name("a7") / "LEADERBOARD.md"
HEAD = """# Leaderboard of assignment 7

The first goal decides. Each number is the worst of three seeds. A line is verified if it was measured on seeds that only the
instructor knows. The longest delay counts only if the tenant who gets less has a goodput above 0.3; otherwise it stands here as 22 s.
This page is written by

```bash
python -m tutorials.assignments.leaderboard my_scheduler.py --name "Your name"
```

"""
Rows = dict[str, list[str]]  # name -> the values of the goals, date, verified


def read_rows(page: str) -> Rows:
    """The lines of the table, without its two headings and without the ranks."""
    lines = [line for line in page.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: others for _, name, *others in cells}


def problem_of(report: Report) -> str | None:
    """A scheduler that breaks a rule, or changes an answer, has no place in the table."""
    broken = (c for c in report.checks if c.name not in report.values and c.score < c.max_score)
    return next((f"{check.name}: {check.output}" for check in broken), None)


def new_row(task: Task, report: Report, is_verified: bool) -> list[str]:
    values = [f"{report.values[name]:.4g}" for name in task.goals]
    return [*values, date.today().isoformat(), "yes" if is_verified else "public seeds"]


def new_page(task: Task, rows: Rows) -> str:
    """The best first; of two that are equal, the one that was there first."""
    goals = [*task.goals.values()]
    is_more_better = goals[0].full > goals[0].none
    ranked = sorted(rows.items(), key=lambda row: float(row[1][0]), reverse=is_more_better)
    titles = ["rank", "name", *(goal.name for goal in goals), "date", "verified"]
    lines = [
        titles,
        ["---"] * len(titles),
        *([str(i), name, *row] for i, (name, row) in enumerate(ranked, start=1)),
    ]
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the file with MyScheduler")
    parser.add_argument("--name", required=True, help="what stands in the table")
    add_options(parser)
    args = parser.parse_args(arguments)
    check_path(parser, args.path)
    name = args.name.strip()
    if not name or not name.isprintable() or "|" in name:
        parser.error(
            f"--name {name!r} is not allowed: it must be one line, not empty and without |"
        )
    grader = new_grader(parser, args, "a7")
    grader.task = replace(grader.task, own=())  # whose run it is does not matter here
    with interruptible():
        report = grader.grade(args.path)
    task = grader.task
    print(report.table())
    if problem := problem_of(report):
        raise SystemExit(f"{name!r} gets no line, because not all rules were kept. {problem}")
    rows = read_rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    rows[name] = new_row(task, report, grader.is_secret)
    try:
        write_whole(PAGE, new_page(task, rows))
    except OSError as error:
        raise SystemExit(f"{PAGE} was not written: {error.strerror}") from None


if __name__ == "__main__":
    main()
