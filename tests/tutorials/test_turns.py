"""Engines that compute in turns: which engine is asked when, what becomes of one that fails, and that nothing
is left running.

Run: pytest tests/tutorials/test_turns.py [-k order]
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tutorials.measure import turns
from tutorials.measure.engines import Job
from tutorials.measure.turns import Turns

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="os.killpg is not there")
# The name of an engine says how it behaves; job["model"] is a file that all write their turns into.
FAKE_WORKER = """
import json, os, socket, subprocess, sys, time

pipe = socket.socket(fileno=int(sys.argv[-1])).makefile("rw")
job = json.loads(pipe.readline())
name = job["engine"]

def tell(answer):
    print(json.dumps(answer), file=pipe, flush=True)

def note(*words):
    with open(job["model"], "a") as file:
        print(name, *words, file=file)

print("this goes to the log")
note("starts", os.getpid())
if name == "fails at start":
    print("no memory", file=sys.stderr)
    sys.exit(1)
if name == "leaves a child":  # which holds the socket, too
    subprocess.Popen(["sleep", "100"], close_fds=False)
    os.kill(os.getpid(), 9)
tell({"version": name})
for line in pipe:
    question, *arguments = json.loads(line)
    note(question, *arguments)
    if question == "round" and name == "says why":
        tell({"error": "too many requests"})
        break
    if question == "round" and name == "fails in round 2" and arguments == [2]:
        os._exit(3)
    if question == "round" and name == "hangs":
        time.sleep(100)
    tell({"seconds": 1.5, "answers": []} if question == "round" else {"observed": question})
if name == "does not end":
    time.sleep(100)
"""


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The file that fake engines write their turns into."""
    monkeypatch.setattr(turns, "REST", 0.0)
    monkeypatch.setattr(turns, "SILENCE", 0.0)
    monkeypatch.setattr(turns, "GRACE", 0.3)
    (tmp_path / "fake_worker.py").write_text(FAKE_WORKER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/fake_worker.py" "$@"\n')
    python.chmod(0o755)
    return tmp_path / "record"


def play(record: Path, names: list[str], num_rounds: int = 2, **how) -> tuple[dict, list[str]]:
    """The results, and the lines of the record."""
    python = str(record.with_name("python"))
    with Turns(dict.fromkeys(names, python)) as all_turns:
        for name in names:
            all_turns.start(Job(str(record), name))
        for _ in all_turns.play(num_rounds, **how):
            pass
    return all_turns.results(), record.read_text(encoding="utf-8").splitlines()


def running(lines: list[str]) -> list[int]:
    """The fake engines of a record of which something still runs. Each is a session."""
    sessions = {line.split()[-1] for line in lines if " starts " in line}
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, _, session, *_ = file.read_text(encoding="utf-8").rpartition(") ")[2].split()
            if session in sessions and state != "Z":
                found.append(int(session))
    return found


def test_order_of_turns(record):
    """Another engine begins in each round, and ours is observed after all."""
    results, lines = play(record, ["ours", "a", "b"])
    asked = [line for line in lines if " starts " not in line]
    order = ["ours a b", "a b ours", "b ours a", "ours a b"]
    expected = [
        f"{name} {question}"
        for number, names in enumerate(order)
        for name in names.split()
        for question in ("wake", f"round {number}")
    ]
    assert asked == [*expected, "ours wake", "ours observe 4"]
    for name, result in results.items():
        assert result["version"] == name and len(result["warm_up"]) == len(result["runs"]) == 2
    assert results["ours"]["observed"] == "observe" and "observed" not in results["a"]
    assert not running(lines)


@pytest.mark.parametrize(
    "name, error, num_rounds",
    [
        ("fails at start", "no memory", 0),
        ("leaves a child", "this goes to the log", 0),
        ("says why", "too many requests", 1),
        ("fails in round 2", "this goes to the log", 3),
    ],
)
def test_an_engine_that_fails_is_reported_and_the_others_go_on(
    record, capsys, name, error, num_rounds
):
    results, lines = play(record, ["ours", name, "other"])
    assert results[name] == {"error": error}
    assert sum(line.startswith(f"{name} round") for line in lines) == num_rounds
    assert len(results["ours"]["runs"]) == len(results["other"]["runs"]) == 2
    assert "this goes to the log" in capsys.readouterr().err
    assert not running(lines)
