"""Your own run: python -m tutorials.assignments.own a1 my_scheduler.py [--out FOLDER]

Your file says whose it is: NAME = "Ada Lovelace". The name gives a seed, and the seed a load that no
other name has. The command prints what your scheduler makes of it, and questions for you. --out
writes all requests and all steps as tables, which a spreadsheet can open.
"""

import argparse
import csv
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from nanovllm import Run
from tutorials.assignments.own_questions import Question, own_seed, problem_of_name
from tutorials.assignments.own_tables import RequestRow, StepRow, Tables, tables_of
from tutorials.assignments.public import classes_of, load, serve_both
from tutorials.assignments.task import NAMES, load_task
from tutorials.report import aligned
from tutorials.simulation.metrics import summary, table

# of a summary: none of them is an answer
NUMBERS = (
    ("requests", "requests", ",d"),
    ("seconds of the run", "seconds", ",.2f"),
    ("TTFT, mean (s)", "ttft mean", ",.3f"),
    ("TTFT, longest (s)", "ttft max", ",.3f"),
    ("end to end, mean (s)", "latency mean", ",.3f"),
    ("between tokens, longest (s)", "between_tokens max", ",.4f"),
    ("preemptions", "preemptions", ",d"),
)
NUM_SHOWN = 10  # requests
WIDTH = 60  # characters of a time line
LEGEND = ". waits  # computes its prompt  o answers  x stands still"


# --- the page ---


def numbers(runs: dict[str, Run]) -> str:
    return table({name: summary(run) for name, run in runs.items()}, NUMBERS)


def some_requests(request: int, run: Run, rows: list[RequestRow]) -> str:
    """Those that came at about the same time as this one, and when they waited."""
    ordered = sorted(rows, key=lambda row: row.arrival)
    place = ordered.index(rows[request]) // NUM_SHOWN * NUM_SHOWN
    shown = ordered[place : place + NUM_SHOWN]
    begin, end = shown[0].arrival, max(row.last_token for row in shown)
    lines = [["request", "arrival", f"from {begin:.2f} to {end:.2f} s".ljust(WIDTH + 2)]]
    for row in shown:
        cells = time_line(row, [*run.requests[row.request].token_times], begin, end)
        lines.append([str(row.request), f"{row.arrival:.3f}", f"|{cells}|"])
    return f"{aligned(lines)}\n{LEGEND}"


def time_line(row: RequestRow, token_times: list[float], begin: float, end: float) -> str:
    bounds = [begin + (end - begin) * i / WIDTH for i in range(WIDTH + 1)]
    counts = [bisect_left(token_times, bound) for bound in bounds]
    cells = ""
    for i, bound in enumerate(bounds[1:]):
        if bound <= row.arrival or bounds[i] > row.last_token:
            cells += " "
        elif bound <= row.admitted:
            cells += "."
        elif bound <= row.first_token:
            cells += "#"
        else:
            cells += "x" if counts[i] == counts[i + 1] else "o"
    return cells


def to_fill_in(questions: Sequence[Question]) -> str:
    lines = [f'    "{each.__name__}": None,  # {each.__doc__}' for each in questions]
    return "\n".join(["ANSWERS = {", *lines, "}"])


# --- tables ---


def write(rows: Sequence[RequestRow] | Sequence[StepRow], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0]._fields)
        for row in rows:
            writer.writerow([f"{x:.6f}" if isinstance(x, float) else x for x in row])


def is_folder(path: Path) -> bool:
    """Or can be made."""
    return path.is_dir() if path.exists() else path.parent.is_dir()


def write_tables(tables: Tables, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write(tables.requests, folder / "requests.csv")
    write(tables.steps, folder / "steps.csv")


# --- the command ---


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in NAMES if load_task(name).own]
    parser.add_argument("task", choices=names)
    parser.add_argument("path", type=Path, metavar="FILE", help="your file")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the tables into it")
    args = parser.parse_args(argv)
    if not args.path.is_file():
        parser.error(f"{args.path}: there is no such file")
    if args.out is not None and not is_folder(args.out):
        parser.error(f"--out {args.out} is not allowed: it must be a folder, or a new one in one")
    args.module, args.task = load(args.path), load_task(args.task)
    args.name = getattr(args.module, "NAME", None)
    if problem := problem_of_name(args.name):
        parser.error(f"{args.path}: {problem}")
    try:
        classes_of(args.task.own_part, args.module)
    except ValueError as error:
        parser.error(f"{args.path}: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    part, questions = args.task.own_part, args.task.own
    seed = own_seed(args.name)
    runs = serve_both(part, args.module, seed)
    baseline, run = runs.values()
    tables = tables_of(run, baseline)
    print(f"{part.name}, the load of {args.name}, seed {seed}\n{numbers(runs)}\n")
    print("Some of the requests:\n")
    print(some_requests(min(questions[0](tables)), run, tables.requests))
    print(f"\nQuestions. Put the answers, which are integers, into {args.path.name}:\n")
    print(to_fill_in(questions))
    if args.out is None:
        print("\nWith --out FOLDER, all requests and all steps are written into tables.")
        return
    write_tables(tables, args.out)
    print(f"\nwritten: {args.out / 'requests.csv'}, {args.out / 'steps.csv'}")


if __name__ == "__main__":
    main()
