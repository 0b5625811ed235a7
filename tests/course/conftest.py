"""Grades a file, and looks at what is left of it."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from submissions import TASK, UID

from tutorials.assignments import grader, process
from tutorials.assignments.accounts import Account
from tutorials.assignments.descendants import children
from tutorials.assignments.grade import grade_file
from tutorials.assignments.grader import Grader
from tutorials.assignments.task import Task


@pytest.fixture
def impatient(monkeypatch):
    """What never comes is waited for a shorter time."""
    monkeypatch.setattr(process, "SECONDS_PER_CALL", 2.0)
    monkeypatch.setattr(process, "SECONDS_TO_SAY_WHERE", 1.0)
    monkeypatch.setattr(grader, "SECONDS_TO_STOP", 1.0)


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """A folder of our own for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def graded(tmp_path, capsys):
    """Grades a file, and looks at what is left of it; the results as JSON."""

    def graded(code: str | bytes, task: Task = TASK, limit: float = 60, **options) -> dict:
        path, target = tmp_path / "my_scheduler.py", tmp_path / "results.json"
        path.write_bytes(code if isinstance(code, bytes) else code.encode())
        processes = children()
        graded_by = Grader(task, [1], limit=limit, **options)
        start = time.monotonic()
        grade_file(graded_by, path, target)
        assert time.monotonic() - start < limit + grader.SECONDS_TO_STOP + 10
        assert children() == processes
        results = json.loads(target.read_text())
        for check in results["tests"]:
            assert check["output"].isprintable() and len(check["output"]) <= 510, check
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(results["tests"]) + 1  # nobody has forged one
        return results

    return graded


@pytest.fixture
def account(monkeypatch):
    """A user, and a Python that he can run."""
    account = Account("student", UID, UID)
    assert not account.processes()
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import sys; assert sys.version_info >= (3, 10)"]
        try:
            subprocess.run(command, user=UID, group=UID, check=True, cwd="/", capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        monkeypatch.setattr(process.sys, "executable", python)
        yield account
        account.clean()
        return
    pytest.skip("no Python that another user can run")
