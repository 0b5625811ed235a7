"""Five schedulers and what they come to, to the last digit: run by CPython and by Pyodide, which must agree.

Tests import this file. An example that does: pytest tests/course/test_lab_built.py --slow -k same_numbers
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from tutorials.assignments.public import classes_of, load
from tutorials.assignments.task import load_task, serve, serve_baseline
from tutorials.simulation.metrics import summary

ASSIGNMENTS = ("a1", "a2", "a4", "a5", "a8")
NUM_JOBS = 250  # of each load, the first ones


def numbers(root: Path) -> Iterator[tuple[str, str]]:
    """Of each reference solution the metrics, the goals, and a digest of the times of all tokens, as JSON."""
    for name in ASSIGNMENTS:
        whole = load_task(name).parts[0]
        part = replace(whole, workload=lambda seed, whole=whole: whole.workload(seed)[:NUM_JOBS])
        solution = root / "tests" / "course" / "solutions" / f"{name}_solution.py"
        run = serve(part, classes_of(part, load(solution))[0], 1, check=False)
        baseline = serve_baseline(part, 1)
        times = repr([[*served.token_times] for served in run.requests])
        found = {
            "summary": summary(run),
            "goals": [goal.measure(run, baseline) for goal in part.goals],
            "times": sha256(times.encode()).hexdigest(),
        }
        yield name, json.dumps(found)
