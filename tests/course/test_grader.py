"""The grader: a mistake costs the points of what it breaks, with a clear message; the grader goes on and ends.

Run: pytest tests/course/test_grader.py [-k memory] [--slow]
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import submissions
from submissions import FCFS, SHORTEST_FIRST, TASK, choose, method, priority

from tutorials.assignments import grader
from tutorials.assignments.grade import grade_file, main, secret_seeds
from tutorials.assignments.grader import Grader, playing
from tutorials.assignments.play import play
from tutorials.assignments.task import measure

ROOT = Path(__file__).parents[2]
LIMIT = 12  # seconds of a process; 2 to 4 of a call
ROUTER = choose("return in_turn(request, loads)")
ANSWERS = "ANSWERS = {'A': 4}\n"
OTHERS = ROUTER + ANSWERS  # what is right in a file with a wrong scheduler


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """Grades a file, and returns what Gradescope is told."""
    monkeypatch.setattr(grader, "WAITING", 100)  # this machine may be busy

    def graded(code: str | bytes, **options) -> dict:
        path, target = tmp_path / "my_scheduler.py", tmp_path / "results.json"
        path.write_bytes(code if isinstance(code, bytes) else code.encode())
        grade_file(Grader(TASK, submissions.__name__, [1], LIMIT, **options), path, target)
        return json.loads(target.read_bytes())

    return graded


def test_a_right_file_has_the_values_of_a_simulation(graded, capsys):
    results = graded(SHORTEST_FIRST + OTHERS)
    scores = [test["score"] for test in results["tests"]]
    namespace: dict = {}
    exec(SHORTEST_FIRST + ROUTER, namespace)
    values = [
        measure(part, namespace[part.policy[0]], seed=1)["mean latency"] for part in TASK.parts
    ]
    goals = [round(part.goals[0].score(value), 2) for part, value in zip(TASK.parts, values)]
    assert values[0] != 1 == values[1]
    assert scores == [5, 20, goals[0], 10, goals[1]]
    assert [one["value"] for one in results["leaderboard"]] == [round(one, 4) for one in values]
    assert capsys.readouterr().out.splitlines()[-1].endswith("of  115  in all")


# --- mistakes of which a process takes care ---

MISTAKES = {  # code, message
    "endless loop": (method("while True:\n    pass"), r"^TooSlow: .* 2 s of a processor \(line 4 "),
    "endless loop in C": (method("sum(iter(int, 1))"), "it took too much time or memory$"),
    "catches all": (
        method("while True:\n    try:\n        pass\n    except:\n        pass"),
        "TooSlow|too much time or memory",
    ),
    "exit": (method("raise SystemExit(3)"), r"^SystemExit: 3 \(line 4 of the file\)$"),
    "os._exit": (method("import os\nos._exit(0)"), "ended by itself: exit status 0$"),
    "segmentation fault": (method("import ctypes\nctypes.string_at(0)"), "itself: SIGSEGV$"),
    "memory": (method("self.x = bytearray(2**33)"), r"^MemoryError \(line 4 of the file\)$"),
    "large file": (method("while True:\n    print('x' * 2**20)"), "^OSError: .*File too large"),
    "recursion": (method("return self.schedule()"), "^RecursionError: "),
    "input": (method("input()"), "^EOFError: .* reading a line"),
    "a long error": (method("raise ValueError('x' * 10**8)"), "^ValueError: x{50,}"),
    "sleeps first": (method("import time\ntime.sleep(4)\nreturn self.other()"), "^AttributeError"),
}


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_costs_only_the_points_of_what_it_breaks(graded, case):
    code, message = MISTAKES[case]
    question, rules, goal, *others = graded(code + OTHERS)["tests"]
    assert [test["score"] for test in (question, rules, goal)] == [5, 0, 0]
    assert re.search(message, rules["output"]), rules
    assert len(rules["output"]) <= 510 and rules["output"].isprintable()
    assert goal["output"].startswith("not measured, because a rule was broken; ")
    assert [test["score"] for test in others] == [10, 20]


UNREADABLE = {
    "syntax": (b"def f(:\n", r"^SyntaxError: .*line 1\)$"),
    "no module": (b"\nimport no_such_module\n", r"No module named .* \(line 2 of the file\)$"),
    "exit": (b"import sys\nsys.exit('no')\n", r"^SystemExit: no \(line 2 of the file\)$"),
    "endless": (b"while True:\n    pass\n", r"^TooSlow: .*\(line \d of the file\)$"),
    "UTF-16": (FCFS.encode("utf-16"), "^your file cannot be read, save it as UTF-8: "),
    "Latin-1": ("# J\u00fcrgen\n".encode("latin-1"), "save it as UTF-8: "),
    "unknown coding": (b"# coding: klingon\n", "save it as UTF-8: unknown encoding: klingon$"),
    "NUL": (FCFS.encode() + b"\0", "null bytes"),
}


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_loaded_is_said_once(graded, case):
    code, message = UNREADABLE[case]
    results = graded(code)
    (test,) = results["tests"]
    assert results["score"] == 0 and test["max_score"] == TASK.points
    assert re.search(message, test["output"]), test


def test_what_a_file_leaves_behind_is_ended(graded, tmp_path):
    """A lock of its child is free again."""
    import fcntl  # not on Windows

    path = tmp_path / "lock"
    leaves = f"import fcntl, os, time\nlock = open({str(path)!r}, 'w')\nif os.fork() == 0:\n"
    leaves += "    fcntl.flock(lock, fcntl.LOCK_EX)\n    time.sleep(1000)\n"
    assert graded(leaves + ANSWERS)["score"] == 5
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_a_file_that_only_waits_is_ended(monkeypatch, tmp_path):
    path = tmp_path / "waits.py"
    path.write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(grader, "WAITING", 0.1)
    with playing(submissions.__name__, path, 1, "load") as player:
        said = player.outcome().problem
    assert said == "your file has not ended after 0.1 s: what does it wait for?"
    assert player.process.returncode == -signal.SIGKILL


# --- rules that a plan must keep: what is said of them, in this process ---

STEALS = """
super().admit(request)
if len(self.running) > 1:
    request.sequences[0].block_table[-1] = self.running[0].sequences[0].block_table[-1]
"""
RULES = {
    "over the budget": (
        method("return 10**6, 10**6", "step_budget"),
        r"step 1, .*: the schedule has \d+ tokens, but max_num_batched_tokens=512$",
    ),
    "steals": (method(STEALS, "admit", ", request"), r"step \d+.*block"),
    "ends early": (
        method("return 'length'", "reason_to_end", ", seq"),
        r"step \d+, .* has ended after 1 of \d+ tokens",
    ),
    "crashes": (
        priority("request.arrival / (request.num_output_tokens - 5)"),
        r"^ZeroDivisionError: .* \(line 4 of the file\)$",
    ),
    "no class": (ANSWERS, "no class MyScheduler that is a subclass of Scheduler"),
    "no such replica": (choose("return 7"), r"MyRouter.choose\(\): 7 is not one of \[0, 1\]"),
    "crashes in the router": (
        choose("return in_turn(request, loads) // (loads[0] < 3)"),
        r"ZeroDivisionError: .* \(line \d+ of the file\)",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_what_is_broken_is_a_message(tmp_path, case):
    code, message = RULES[case]
    path = tmp_path / "solution.py"
    path.write_text(code)
    index = int(code.startswith("from nanovllm import R") or "router" in case)
    problem = play(TASK, path, "part", index).problem
    assert re.search(message, problem) and "\n" not in problem, problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, message",
    [
        (SHORTEST_FIRST, ""),
        (method(STEALS, "admit", ", request"), "the blocks do not add up"),
        (priority("1 / 0"), r"ZeroDivisionError: .* \(line 4 of the file\)"),
        (method("return 'length'", "reason_to_end", ", seq"), "not those of any other schedule"),
    ],
)
def test_the_real_engine(tmp_path, code, message):
    path = tmp_path / "solution.py"
    path.write_text(code)
    problem = play(TASK, path, "engine").problem
    assert re.search(message, problem) and bool(problem) == bool(message), problem


# --- the command line ---


def test_a_secret_gives_the_seeds(graded, tmp_path, capsys, monkeypatch):
    seeds = secret_seeds("a", "a1")
    assert seeds == secret_seeds("a", "a1") != secret_seeds("b", "a1") != secret_seeds("b", "a2")
    assert all(2**100 < seed < 2**128 for seed in seeds)
    assert "hello" in graded("print('hello')\n")["output"]
    assert not graded("print('hello')\n", is_secret=True)["output"]
    pipe = io.StringIO("too short\n")
    monkeypatch.setattr(sys, "stdin", pipe)
    with pytest.raises(SystemExit):
        main(["a1", str(tmp_path / "my_scheduler.py"), "--secret"])
    assert pipe.closed and "16 characters or more" in capsys.readouterr().err


LOOKS = """
import pathlib
for path in [*pathlib.Path("/proc").glob("[0-9]*/cmdline"), *pathlib.Path("/proc").glob("[0-9]*/environ")]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        continue
    assert "{word}" not in text, path
assert not open(0).read()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc")
@pytest.mark.parametrize(
    "word, found", [(f"{2**100 + 7}", False), (sys.executable, True)], ids=["seed", "program"]
)
def test_a_seed_is_in_no_command_variable_or_pipe(tmp_path, word, found):
    path = tmp_path / "my_scheduler.py"
    path.write_text(f"{LOOKS.format(word=word)}\n{FCFS}")
    with playing(submissions.__name__, path, LIMIT, "part", 0, 2**100 + 7) as player:
        assert ("AssertionError: /proc" in player.outcome().problem) == found


def test_the_script_of_gradescope(tmp_path):
    """The folders are those of its container."""
    for name in ("source", "submission", "results", "venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / "source"
    for name in ("nanovllm", "tutorials"):
        (source / name).symlink_to(ROOT / name)
    (source / "assignment.txt").write_text("a1\n")
    (source / "secret.txt").write_text("a long enough secret\n")
    python = tmp_path / "venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "submission/my_scheduler.py").write_text("raise ValueError('this is it')\n")
    script = ROOT / "tutorials/assignments/gradescope/run_autograder"
    env = {**os.environ, "AUTOGRADER": str(tmp_path)}
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "results/results.json").read_bytes())
    assert "this is it" in results["tests"][0]["output"]


def test_several_files(tmp_path):
    """Each has results of its own, also if it does not load. What cannot be written is a sentence."""
    files = [tmp_path / f"{name}.py" for name in ("blocked", "one")]
    for path in files:
        path.write_text(f"raise ValueError('this is {path.stem}')\n")
    folder = tmp_path / "results"
    (folder / "blocked.json").mkdir(parents=True)
    command = [sys.executable, "-m", "tutorials.assignments.grade", "a1", *map(str, files)]
    command += ["--json", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert f"{folder / 'blocked.json'} was not written: Is a directory" in result.stderr
    assert "this is blocked" in result.stdout and "Traceback" not in result.stderr
    results = json.loads((folder / "one.json").read_bytes())
    assert results["tests"][0]["output"] == "ValueError: this is one (line 1 of the file)"


def test_ctrl_c_is_a_sentence(tmp_path):
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for path in files:
        path.write_text("while True:\n    pass\n")
    command = [sys.executable, "-m", "tutorials.assignments.grade", "a1", *map(str, files)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline().startswith("--- ")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert said.splitlines() == ["interrupted: what has no line above was not graded"]
    assert process.returncode == 1
