"""Many seeds and policies as one table, for an author or a grader of an assignment.

    python -m tutorials.assignments.seeds a1 my_scheduler.py            # beside FCFS, on 20 seeds
    python -m tutorials.assignments.seeds a1 submissions/*.py --count 5 --check
    python -m tutorials.assignments.seeds a1 --silly tried.py --json a1.json

A file with the class that the assignment asks for is one row. From any other file, each scheduler
in it is one, and for an assignment about routers, each router. `--silly` adds the policies of silly.py. A row shows for each goal the best and the worst
seed, and the goal points of the seeds with most and with least. A policy that breaks gets no points
on this seed, and the row says so.

The files run in this process, without the grader's limits: look at a file before. The rules are
checked only with --check, which takes longer.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from nanovllm import Run
from nanovllm.block_manager import BlockManager
from tutorials.arguments import experiment, positive
from tutorials.assignments import silly
from tutorials.assignments.public import check_rules, classes_of, explained, load
from tutorials.assignments.task import NAMES, Task, load_task, name_in_report, serve_baseline
from tutorials.report import aligned, markdown

SILLY = Path(silly.__file__)
Values = dict[str, float]  # of each goal, by its name in a report
Rows = dict[str, list[Values | str]]  # name of a policy -> for each seed: values, or what it broke
BASES = ("Silly", "SillyRouter")  # of policies, and none themselves
KINDS = ("silly", "tried", "solution")  # in the order of a table

# --- policies ---


class Policy(NamedTuple):
    """A row of the table."""

    name: str
    kind: str  # one of KINDS
    path: Path
    module: Any  # has the classes that the assignment asks for
    problem: str | None = None  # why it has none


def policies_of(task: Task, paths: Sequence[Path]) -> list[Policy]:
    """Of all files, in the order of the table. No two have the same name."""
    files = list(dict.fromkeys(paths))
    stems = Counter(path.stem for path in files)
    found, names = list[Policy](), {baseline_of(task)}
    for path in files:
        name = path.stem if stems[path.stem] == 1 else str(path)
        for policy in policies_in(task, path, name):
            policy = policy._replace(name=unused(policy.name, names))
            names.add(policy.name)
            found.append(policy)
    return sorted(found, key=lambda policy: KINDS.index(policy.kind))


def baseline_of(task: Task) -> str:
    """The name of the first row."""
    return task.parts[0].baseline


def unused(name: str, names: set[str]) -> str:
    number, free = 1, name
    while free in names:
        number += 1
        free = f"{name} {number}"
    return free


def policies_in(task: Task, path: Path, name: str) -> Iterator[Policy]:
    """One for a file with a class that the assignment asks for; otherwise one for each scheduler or
    router, which stands for all classes that it asks for."""
    try:
        module = load(path)
    except (Exception, SystemExit) as error:
        yield Policy(name, "solution", path, None, explained(error, path))
        return
    asked = dict(part.policy for part in task.parts)
    bases = tuple(asked.values())
    own = [cls for cls in vars(module).values() if is_policy(cls, bases, module.__name__)]
    names = [name for name in asked if getattr(module, name, None) not in (None, *bases)]
    if names or not own:
        try:
            for part in task.parts:
                classes_of(part, module)
        except ValueError as error:
            yield Policy(name, "solution", path, module, str(error))
        else:
            yield Policy(name, "silly" if is_silly(module) else "solution", path, module)
        return
    plain = {part.block_manager: BlockManager for part in task.parts if part.block_manager}
    for cls in own:
        doc = (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")
        classes = SimpleNamespace(**dict.fromkeys(asked, cls), **plain)
        yield Policy(doc, "silly" if is_silly(cls) else "tried", path, classes)


def is_silly(said_by: Any) -> bool:
    """A class, or a whole file."""
    return getattr(said_by, "is_silly", False) is True


def is_policy(value: Any, bases: tuple[type, ...], module: str) -> bool:
    is_class = isinstance(value, type) and issubclass(value, bases)
    return is_class and value.__module__ == module and value.__name__ not in BASES


# --- runs ---


def measure_seed(
    task: Task, paths: Sequence[Path], check: bool, seed: int
) -> dict[str, Values | str]:
    """Of each policy on one seed."""
    baselines = [serve_baseline(part, seed) for part in task.parts]
    found: dict[str, Values | str] = {baseline_of(task): values_of(task, baselines, baselines)}
    with redirect_stdout(sys.stderr):  # what files print is no part of the table
        for policy in policies_of(task, paths):
            found[policy.name] = measure_policy(task, policy, baselines, check, seed)
    return found


def measure_policy(
    task: Task, policy: Policy, baselines: list[Run], check: bool, seed: int
) -> Values | str:
    if policy.problem is not None:
        return policy.problem
    try:
        runs = [check_rules(part, policy.module, seed, check) for part in task.parts]
        return values_of(task, runs, baselines)
    except (Exception, SystemExit) as error:
        return explained(error, policy.path)


def values_of(task: Task, runs: list[Run], baselines: list[Run]) -> Values:
    return {
        name_in_report(part, goal): goal.measure(run, baseline)
        for part, run, baseline in zip(task.parts, runs, baselines)
        for goal in part.goals
    }


def measure_seeds(
    task: Task, paths: Sequence[Path], seeds: Sequence[int], check: bool = False
) -> Rows:
    """In as many processes as there are processors."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        measured = list(pool.map(partial(measure_seed, task, paths, check), seeds))
    return {name: [of_seed[name] for of_seed in measured] for name in measured[0]}


# --- tables ---


def points_of(task: Task, values: Values | str) -> float:
    """For goals alone."""
    if isinstance(values, str):
        return 0.0
    return sum(goal.score(values[name]) for name, goal in task.goals.items())


def table(task: Task, rows: Rows) -> list[list[str]]:
    """Of each policy: for each goal the best and the worst seed, and the points of the seeds with
    most and least."""
    goals = task.goals
    total = sum(goal.points for goal in goals.values())
    single = len(task.parts) == 1
    names = [name.partition(", ")[2] if single else name for name in goals]
    head = "Scheduler" if task.parts[0].router is None else "Router"
    lines = [[head, *names, f"goals, of {total:g}"]]
    for policy, of_seeds in rows.items():
        measured = [values for values in of_seeds if not isinstance(values, str)]
        cells = []
        for name, goal in goals.items():
            values = sorted((v[name] for v in measured), reverse=goal.full > goal.none)
            cells.append(span(values[0], values[-1], ".3g") if values else "broken")
        points = sorted((points_of(task, values) for values in of_seeds), reverse=True)
        num_broken = len(of_seeds) - len(measured)
        note = f" (broken on {num_broken} of {len(of_seeds)} seeds)" if num_broken else ""
        lines.append([policy, *cells, span(points[0], points[-1], ".0f") + note])
    return lines


def span(first: float, last: float, form: str) -> str:
    first_text, last_text = format(first, form), format(last, form)
    return first_text if first_text == last_text else f"{first_text} to {last_text}"


def what_broke(rows: Rows, seeds: Sequence[int]) -> Iterator[str]:
    """For each policy that broke, what it says on the first such seed."""
    for name, of_seeds in rows.items():
        for seed, values in zip(seeds, of_seeds):
            if isinstance(values, str):
                yield f"{name}, seed {seed}: {values}"
                break


def handout_table(report: dict) -> str:
    """For a handout, from the JSON file."""
    names = sorted(report["rows"], key=lambda name: name not in report["silly"])  # stable
    rows, seeds = {name: report["rows"][name] for name in names}, report["seeds"]
    lines = table(load_task(report["task"]), rows)
    about = f"On seeds {seeds[0]} to {seeds[-1]}, the best and the worst one:"
    return f"{about}\n\n{markdown(lines)}"


# --- the command ---


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = experiment(__doc__, "write all values to this file")
    parser.add_argument("task", choices=NAMES)
    parser.add_argument("paths", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--silly", action="store_true", help="also the policies of silly.py")
    parser.add_argument("--count", type=positive, default=20, help="how many seeds (default: 20)")
    parser.add_argument("--first", type=positive, default=1, help="the first (default: 1)")
    parser.add_argument("--check", action="store_true", help="check the rules in each step, too")
    args = parser.parse_intermixed_args(argv)
    for path in args.paths:
        if not path.is_file():
            parser.error(f"{path}: there is no such file")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    task, paths = load_task(args.task), [SILLY] * args.silly + args.paths
    seeds = range(args.first, args.first + args.count)
    try:
        rows = measure_seeds(task, paths, seeds, args.check)
    except BrokenProcessPool:
        sys.exit("One of the files has ended its process: leave files out until you know which.")
    print("\n".join([aligned(table(task, rows)), *what_broke(rows, seeds)]))
    if args.json:
        with redirect_stdout(sys.stderr):
            policies = policies_of(task, paths)
        silly = [baseline_of(task), *(policy.name for policy in policies if policy.kind == "silly")]
        report = {"task": args.task, "seeds": [*seeds], "silly": silly, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
