"""Whatever a file does, its grading ends in time, with valid JSON and one sentence, and leaves nothing behind.

Run: pytest tests/course/test_hostile_files.py [--slow] [-k note]
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from submissions import FCFS, HEAD, PART, TASK, choose, method, sentence

from conftest import wait_until_none_runs
from tutorials.assignments import grader
from tutorials.assignments.problems import Kind
from tutorials.assignments.task import Task
from tutorials.simulation.workloads import all_at_once, fixed, workload

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("impatient")


# --- limits ---


def test_there_are_limits_and_its_group_is_ended(graded):
    """The fixture looks for processes that are left."""
    leaves = (
        "import os, time\nif os.fork() == 0:\n    os.fork() or os.setsid()\n    time.sleep(1000)\n"
    )
    assert graded(leaves + FCFS)["score"] == 30
    link = "import os\nfolder = os.getcwd()\nos.rmdir(folder)\nos.symlink('/nowhere', folder)\n"
    assert graded(link + FCFS)["score"] == 30
    assert "not answered for 2 s" in sentence(graded(method("while True:\n    pass")))
    assert "File too large" in sentence(graded("open('x', 'w').write('x' * 2**21)\n" + FCFS))
    if sys.platform == "linux":
        assert "MemoryError" in sentence(graded("x = bytearray(3 * 2**30)\n" + FCFS))


def test_a_file_sees_no_variables_and_works_in_a_folder_of_its_own(graded, monkeypatch):
    code = "import os\nopen('x', 'w').write('x')\nprint(sorted(os.environ), os.listdir())\n"
    monkeypatch.setenv("SECRET", "s3cret")
    results = graded(code + FCFS)
    assert results["score"] == 30
    assert results["output"].endswith("['x']\n") and "SECRET" not in results["output"]


# --- what ends the grading itself ---


def test_ctrl_c_is_a_sentence_and_leaves_nothing(tmp_path):
    files = [tmp_path / "one.py", tmp_path / "two.py"]
    for path in files:
        path.write_text("while True:\n    pass\n")
    (tmp_path / "temporary").mkdir()
    program = "import signal\nfrom tutorials.assignments.grade import main\n"
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in background
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}main({['a1', *map(str, files)]})"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline().startswith("--- ")
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert said.splitlines()[-1] == "interrupted: what has no line above was not graded"
    assert process.returncode == 1 and "Traceback" not in said
    # Python itself tries a folder with a small file, which an interrupt may leave there
    assert not [path for path in (tmp_path / "temporary").iterdir() if path.is_dir()]
    wait_until_none_runs(str(tmp_path / "temporary"))


# --- the protocol ---

# one answer of so many tokens that an unread pipe fills
LONG_JOBS = workload(all_at_once(), fixed(20, 1900), 1)
LONG = Task("long", [replace(PART, workload=lambda seed: LONG_JOBS)], engine_points=0)
ANSWERS = """
import sys
def answers():
    frame = sys._getframe()
    while "answers" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["answers"]
"""
NEVER_READS = """
self.calls = getattr(self, "calls", 0) + 1
if self.calls < 3:
    return super().schedule()
for _ in range(3000):
    answers().write('{"events": [["compute", "0", 1]], "counts": []}\\\\n')
answers().flush()
import time
time.sleep(1000)
"""
ENDS = """
import os
self.calls = getattr(self, 'calls', 0) + 1
if self.calls > 9:
    os._exit(3)
return super().schedule()
"""


def says(line: str) -> str:
    """A scheduler that sends this in its first step."""
    return ANSWERS + method(f"answers().write({line})\nanswers().flush()")


PROTOCOL = {
    "nested brackets": (says(r"'[' * 60000 + '\n'"), "what is no decision: b'[[[[["),
    "closes everything": (method("import os, time\nos.closerange(0, 100)\ntime.sleep(1000)"), ""),
    "ends in a step": (method(ENDS), "step 10: your process has ended by itself: exit status 3"),
    "never reads": (ANSWERS + method(NEVER_READS), "has not answered for 2 s|more than 4 s in all"),
    "a long line": (says("'[' * 2**22"), "more than 1 MiB for one step"),
    "numbers that are none": (
        says(r"""'{"events": [["compute", "0", 1e400]], "counts": []}\n'"""),
        "step 1",
    ),
    "an error of 100 MB": (method("raise ValueError('x' * 10**8)"), "step 1: ValueError: xxx"),
    "json patched": (
        "import json\njson.dumps = lambda *args: '{}'\n" + FCFS,
        "has no class MyScheduler",
    ),
    "answers that no JSON holds": (
        "ANSWERS = []\nANSWERS.append(ANSWERS)\n" + FCFS,
        "ValueError: Circular reference",
    ),
    "a segmentation fault": (method("import ctypes\nctypes.string_at(0)"), "exit status -11"),
    "stops itself": (
        method("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
        "has not answered for 2 s|more than 4 s",
    ),
    "endless recursion": (method("return self.schedule()"), "RecursionError"),
    "a slow one": (
        method("import time\ntime.sleep(1)\nreturn super().schedule()"),
        "more than 2 s",
    ),
}
CLOSED = "closed the pipe|has not answered for 2 s"
FAST = ("nested brackets", "closes everything", "ends in a step")
LIMITS = {"never reads": 4, "stops itself": 4, "a slow one": 2, "an error of 100 MB": 4}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST)) for case in PROTOCOL]
)
def test_the_protocol(graded, case):
    code, expected = PROTOCOL[case]
    results = graded(code, LONG, limit=LIMITS.get(case, 60))
    assert any(part in sentence(results) for part in (expected or CLOSED).split("|")), results


# --- texts ---

UMLAUT = "# J\u00fcrgen\n"
TEXTS = {
    "BOM": (("\ufeff" + UMLAUT + FCFS).encode(), None),
    "Latin-1": ((HEAD + UMLAUT + FCFS).encode("latin-1"), "not in UTF-8: see line 2"),
    "CRLF": (FCFS.replace("\n", "\r\n").encode(), None),
    "UTF-16": (FCFS.encode("utf-16"), "UTF-16: save it as UTF-8"),
    "Latin-1 as declared": (("# coding: latin-1\n" + UMLAUT + FCFS).encode("latin-1"), None),
    "unknown coding": (b"# coding: klingon\n", "encoding that Python does not know"),
    "prints": (b"print('\\x1b[31m\\ud800' * 10**6)\nprint('the end')\n" + FCFS.encode(), None),
    "NUL": (FCFS.encode() + b"\0", "null bytes"),
    "surrogate in an answer": (b"ANSWERS = {'A': '\\ud800'}\n" + FCFS.encode(), None),
    "lines in an error": (
        b"raise ValueError('\\n 100.0 of  100  in all\\n\\x1b[31m\\u202e')\n",
        "ValueError: 100.0 of 100 in all [31m (line 1",
    ),
    "surrogate in an error": (b"raise ValueError('\\ud800')\n", "ValueError: "),
}


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("case", TEXTS)
def test_texts(graded, case):
    code, expected = TEXTS[case]
    results = graded(code)
    json.dumps(results).encode()
    if expected is None:
        assert results["score"] == 30, results
    else:
        assert expected in sentence(results)
    assert "\x1b" not in results["output"]
    assert case != "prints" or results["output"].endswith("the end\n")


# --- secrets ---

ROUTERS = replace(TASK, parts=[replace(PART, router="MyRouter", replicas=2)])
LENGTHS = "[len(r.prompt_token_ids) for r in self.waiting]"
RULE = "from nanovllm.schedule import ScheduleError\n"
LEAKS = {
    "prints": method(f"print('the load', {LENGTHS})\nreturn super().schedule()"),
    "an error": method(f"raise ValueError({LENGTHS})"),
    "what is no decision": says(r"'lengths 1234\n'"),
    "a router's choice": choose("return 'lengths 1234'"),
    "a class of its own": method("raise type('Lengths1234', (Exception,), {})('1234')"),
    "a rule": RULE + method("raise ScheduleError(self, 'schedule', 'lengths 1234')"),
    "an unknown event": says(r"""'{"events": [["lengths 1234", "0", 1]], "counts": []}\n'"""),
    "where it hangs": method("exec(compile('while True: pass', 'lengths1234', 'exec'))"),
}


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("case", LEAKS)
def test_nothing_of_a_secret_load_is_shown(graded, case):
    """The same file says it on a public seed."""
    task = ROUTERS if case.startswith("a router") else TASK
    public = json.dumps(graded(LEAKS[case], task))
    secret = graded(LEAKS[case], task, is_secret=True)
    tell = ("1234", "ValueError: [", "the load [")
    assert any(text in public for text in tell), public
    assert not any(text in json.dumps(secret) for text in tell), secret
    if case != "prints":
        assert sentence(secret) in {f"{kind.value}; {grader.HIDDEN}" for kind in Kind}


def test_a_secret_load_gives_only_values(graded):
    """Not the number of steps, and of each value as many digits as the report shows."""
    code = method("return 64, 64", "step_budget")
    public, secret = graded(code), graded(code, is_secret=True)
    rules, goal = secret["tests"]
    assert rules["output"] == "all kept" and "steps" in public["tests"][0]["output"]
    value = secret["leaderboard"][0]["value"]
    assert value == pytest.approx(public["leaderboard"][0]["value"], rel=1e-3)
    assert float(f"{value:.4g}") == value and f"{value:.4g}, the worst" in goal["output"]
