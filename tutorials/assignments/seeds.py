"""Many seeds and policies as one table, for whoever makes or changes an assignment.

    python -m tutorials.assignments.seeds a1 my_scheduler.py            # beside FCFS, on 20 seeds
    python -m tutorials.assignments.seeds a1 --silly tried.py --count 5 --json a1.json

A file with the class that the assignment asks for is one row. From any other file, each scheduler
in it is one. `--silly` adds those of silly.py. A row shows for each goal the best and the worst
seed, and the goal points of the seeds with most and with least.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.simulator import Run
from tutorials.assignments.public import load
from tutorials.assignments.task import NAMES, Task, load_task, serve, serve_by_fcfs
from tutorials.performance.report import aligned, markdown

FCFS = "FCFS"
SILLY = Path(__file__).with_name("silly.py")
Values = dict[str, float]  # of each goal, by its name in a report
Rows = dict[str, list[Values | str]]  # name of a policy -> for each seed: values, or what it broke


def rows_of(task: Task, path: Path) -> Iterator[tuple[str, Any]]:
    """Name, and what has the classes that the assignment asks for."""
    module = load(path)
    if all(hasattr(module, part.scheduler) for part in task.parts):
        yield path.stem, module
        return
    for value in vars(module).values():
        is_class = isinstance(value, type) and issubclass(value, Scheduler)
        if is_class and value.__module__ == module.__name__ and value.__name__ != "Silly":
            name = (value.__doc__ or value.__name__).splitlines()[0].rstrip(".")
            classes = {part.scheduler: value for part in task.parts}
            yield name, SimpleNamespace(**classes, is_silly=getattr(value, "is_silly", False))


def measure_seed(task: Task, paths: Sequence[Path], seed: int) -> dict[str, Values | str]:
    """Of each policy on one seed."""
    baselines = [serve_by_fcfs(part, seed) for part in task.parts]
    found: dict[str, Values | str] = {FCFS: values_of(task, baselines, baselines)}
    for path in paths:
        for name, module in rows_of(task, path):
            try:
                runs = [serve_part(part, module, seed) for part in task.parts]
            except (ScheduleError, AssertionError) as error:
                found[name] = str(error)
            else:
                found[name] = values_of(task, runs, baselines)
    return found


def serve_part(part, module: Any, seed: int) -> Run:
    """Without the checks of each step, which take longer than the run. What is not served at all is
    noticed."""
    manager_cls = getattr(module, part.block_manager) if part.block_manager else None
    run = serve(part, getattr(module, part.scheduler), seed, manager_cls, check=False)
    for i, served in enumerate(run.requests):
        assert len(served.token_times) == served.job.num_outputs, f"request {i} lacks tokens"
    return run


def values_of(task: Task, runs: list[Run], baselines: list[Run]) -> Values:
    return {
        f"{part.name}, {goal.name}": goal.measure(run, baseline)
        for part, run, baseline in zip(task.parts, runs, baselines)
        for goal in part.goals
    }


def measure_seeds(task: Task, paths: Sequence[Path], seeds: Sequence[int]) -> Rows:
    """In as many processes as there are processors."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        measured = list(pool.map(partial(measure_seed, task, paths), seeds))
    return {name: [of_seed[name] for of_seed in measured] for name in measured[0]}


# --- tables ---


def goals_of(task: Task) -> dict:
    return {f"{part.name}, {goal.name}": goal for part in task.parts for goal in part.goals}


def points_of(task: Task, values: Values | str) -> float:
    """For goals alone."""
    if isinstance(values, str):
        return 0.0
    return sum(goal.score(values[name]) for name, goal in goals_of(task).items())


def table(task: Task, rows: Rows) -> list[list[str]]:
    """Of each policy: for each goal the best and the worst seed, and the points of the seeds with
    most and least."""
    goals = goals_of(task)
    total = sum(goal.points for goal in goals.values())
    single = len(task.parts) == 1
    names = [name.partition(", ")[2] if single else name for name in goals]
    lines = [["Scheduler", *names, f"goals, of {total:g}"]]
    for policy, of_seeds in rows.items():
        measured = [values for values in of_seeds if not isinstance(values, str)]
        cells = []
        for name, goal in goals.items():
            values = sorted((v[name] for v in measured), reverse=goal.full > goal.none)
            cells.append(span(values[0], values[-1], ".3g") if values else "-")
        points = sorted((points_of(task, values) for values in of_seeds), reverse=True)
        lines.append([policy, *cells, span(points[0], points[-1], ".0f")])
    return lines


def span(first: float, last: float, form: str) -> str:
    first_text, last_text = format(first, form), format(last, form)
    return first_text if first_text == last_text else f"{first_text} to {last_text}"


def handout_table(report: dict) -> str:
    """For a handout, from the JSON file."""
    lines = table(load_task(report["task"]), report["rows"])
    seeds = report["seeds"]
    about = f"On seeds {seeds[0]} to {seeds[-1]}, the best and the worst one:"
    return f"{about}\n\n{markdown(lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("paths", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--silly", action="store_true", help="also the policies of silly.py")
    parser.add_argument("--count", type=int, default=20, help="how many seeds (default: 20)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default: 1)")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    args = parser.parse_intermixed_args()
    for path in args.paths:
        if not path.is_file():
            parser.error(f"path={str(path)!r} is not allowed: there is no such file")
    for option in ("count", "first"):
        value = getattr(args, option)
        if value < 1:
            parser.error(f"--{option} {value} is not allowed: it must be 1 or more")
    task, paths = load_task(args.task), [SILLY] * args.silly + args.paths
    seeds = range(args.first, args.first + args.count)
    rows = measure_seeds(task, paths, seeds)
    print(aligned(table(task, rows)))
    for name, of_seeds in rows.items():
        for seed, values in zip(seeds, of_seeds):
            if isinstance(values, str):
                print(f"{name}, seed {seed}: {values}")
    if args.json:
        silly = [
            name
            for path in paths
            for name, module in rows_of(task, path)
            if getattr(module, "is_silly", False)
        ]
        report = {"task": args.task, "seeds": [*seeds], "silly": [FCFS, *silly], "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
