"""Twenty schedulers and what they come to, to the last digit: run by CPython and by Pyodide, which must agree.

Tests import this file. An example that does: pytest tests/course/test_lab_built.py --slow -k ten_sched
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from shorter import shorter_part

from nanovllm.routing import Router
from nanovllm.scheduler import Scheduler
from tutorials.assignments.task import load_task, serve, serve_baseline
from tutorials.simulation.metrics import summary

NUM_OF_EACH = {"a1": 1, "a2": 1, "a4": 1, "a5": 1, "a8": 1}


def numbers(root: Path) -> Iterator[tuple[str, str]]:
    """Name, and the numbers as JSON: the metrics, the goals, and a digest of the times of all tokens."""
    for name, count in NUM_OF_EACH.items():
        part = shorter_part(load_task(name).parts[0])
        baseline = serve_baseline(part, 1)
        for cls in policies(root, name, part.policy[1])[:count]:
            run = serve(part, cls, 1, check=False)
            times = repr([[*served.token_times] for served in run.requests])
            found = {
                "summary": summary(run),
                "goals": [goal.measure(run, baseline) for goal in part.goals],
                "times": sha256(times.encode()).hexdigest(),
            }
            yield f"{name} {cls.__name__}", json.dumps(found)


def policies(root: Path, name: str, base: type) -> list[type]:
    """The reference solution first, then what else was tried."""
    found = []
    for kind in ("solution", "tried"):
        path = root / "tests" / "course" / "solutions" / f"{name}_{kind}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        found += [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, base) and is_own(value, path.stem)
        ]
    return found


def is_own(cls: type, module: str) -> bool:
    return cls not in (Scheduler, Router) and cls.__module__ == module
