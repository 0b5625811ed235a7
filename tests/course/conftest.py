"""Grades a file, and looks at what is left of it.

The grader is imported late: it refuses a system on which other tests of this folder run.
"""

import json
import tempfile
import time
from pathlib import Path

import pytest
from submissions import TASK

from tutorials.assignments import process
from tutorials.assignments.task import Task


@pytest.fixture
def impatient(monkeypatch):
    """What never comes is waited for a shorter time."""
    monkeypatch.setattr(process, "SECONDS_PER_CALL", 2.0)


@pytest.fixture
def graded(tmp_path, capsys, monkeypatch):
    """Grades a file; the results as JSON. Afterwards nothing of it runs, and its folder is gone."""
    from tutorials.assignments import grader
    from tutorials.assignments.grade import grade_file

    mark = f"# {tmp_path}"  # in the command of all that a file starts
    monkeypatch.setattr(process, "START", f"{process.START} {mark}")

    def graded(code: str | bytes, task: Task = TASK, limit: float = 60, **options) -> dict:
        path, target = tmp_path / "my_scheduler.py", tmp_path / "results.json"
        path.write_bytes(code if isinstance(code, bytes) else code.encode())
        with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
            Path(folder).chmod(0o755)
            patch.setattr(tempfile, "tempdir", folder)
            start = time.monotonic()
            grade_file(grader.Grader(task, [1], limit=limit, **options), path, target)
            assert time.monotonic() - start < limit + 10
            assert not [*Path(folder).iterdir()]
        wait_until_none_runs(mark)
        results = json.loads(target.read_bytes())
        for check in results["tests"]:
            assert check["output"].isprintable() and len(check["output"]) <= 510, check
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(results["tests"]) + 1  # none is forged
        return results

    return graded


def wait_until_none_runs(mark: str, seconds: float = 5.0) -> None:
    """The system needs a moment to end a group of processes."""
    until = time.monotonic() + seconds
    while found := running(mark):
        assert time.monotonic() < until, found
        time.sleep(0.02)


def running(mark: str) -> list[str]:
    """The processes with this in their command, where the system lists them."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if mark in text(path)]


def text(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:  # it has just ended
        return ""
