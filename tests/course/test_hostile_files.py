"""Whatever a file does, its grading ends in time, with valid JSON and one sentence, and leaves nothing behind.

Run: pytest tests/course/test_hostile_files.py [--slow] [-k daemon]
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from submissions import FCFS, HEAD, TASK, UID, for_root, method, sentence

from tutorials.assignments import grader, process
from tutorials.assignments.accounts import Account
from tutorials.assignments.descendants import children
from tutorials.assignments.grade import grade_file
from tutorials.assignments.grader import Grader
from tutorials.assignments.problems import Kind
from tutorials.assignments.task import Part, Task
from tutorials.simulation.workloads import all_at_once, fixed, workload

ROOT = Path(__file__).parents[2]
CONFIG = TASK.parts[0].config
GOAL = TASK.parts[0].goals[0]
pytestmark = pytest.mark.usefixtures("impatient")
# one answer of so many tokens that an unread pipe fills
LONG = Task(
    "long",
    [Part("load", lambda seed: workload(all_at_once(), fixed(20, 1900), 1), CONFIG, [GOAL], 30)],
    engine_points=0,
)


# --- the protocol ---

ANSWERS = """
import sys
def answers():
    frame = sys._getframe()
    while "answers" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["answers"]
"""
NEVER_READS = ANSWERS + method(
    """
self.calls = getattr(self, "calls", 0) + 1
if self.calls < 3:
    return super().schedule()
for _ in range(3000):
    answers().write('{"events": [["compute", "0", 1]], "counts": []}\\\\n')
answers().flush()
import time
time.sleep(1000)
""".strip()
)
CLOSES = "import os, time\nos.closerange(0, 100)\ntime.sleep(1000)"
# in a namespace of its own, it does not even see the process that grades
NO_SUCH_PROCESS = "has not answered for 2 s"
PROTOCOL = {
    "never reads": (NEVER_READS, "has not answered for 2 s|more than 4 s in all"),
    "nested brackets": (
        ANSWERS + method("answers().write('[' * 60000 + '\\n')\nanswers().flush()"),
        "what is no decision: b'[[[[[",
    ),
    "a long line": (
        ANSWERS + method("answers().write('[' * 2**22)\nanswers().flush()"),
        "more than 1 MiB for one step",
    ),
    "numbers that are none": (
        ANSWERS
        + method(
            'answers().write(\'{"events": [["compute", "0", 1e400]], "counts": []}\\n\')\nanswers().flush()'
        ),
        "step 1",
    ),
    "an error of 100 MB": (method("raise ValueError('x' * 10**8)"), "step 1: ValueError: xxx"),
    "closes everything in a step": (method(CLOSES), "closed the pipe"),
    "closes everything at the start": (CLOSES, "closed the pipe"),
    "ends in a step": (
        method(
            "import os\nself.calls = getattr(self, 'calls', 0) + 1\nif self.calls > 9:\n    os._exit(3)\nreturn super().schedule()"
        ),
        "step 10: your process has ended by itself: exit status 3",
    ),
    "json patched": (
        "import json\njson.dumps = lambda *args: '{}'\n" + FCFS,
        "what is no decision",
    ),
    "answers that no JSON holds": ("ANSWERS = {1, 2}\n" + FCFS, "TypeError: Object of type set"),
    "a segmentation fault": (method("import ctypes\nctypes.string_at(0)"), "exit status -11"),
    "stops itself": (
        method("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
        "has not answered for 2 s|more than 4 s",
    ),
    "stops the grader": (
        method("import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(1000)"),
        f"there was no time left|{NO_SUCH_PROCESS}",
    ),
    "ends the grader": (
        method("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)"),
        f"the process that grades was ended|{NO_SUCH_PROCESS}",
    ),
    "endless recursion": (method("return self.schedule()"), "RecursionError"),
    "a slow one": (
        method("import time\ntime.sleep(1)\nreturn super().schedule()"),
        "more than 4 s",
    ),
}
FAST = ("nested brackets", "closes everything in a step", "ends in a step", "ends the grader")
SLOW = ("never reads", "stops itself", "stops the grader", "a slow one", "an error of 100 MB")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in FAST)) for case in PROTOCOL]
)
def test_the_protocol(graded, case, temporary):
    code, expected = PROTOCOL[case]
    results = graded(code, LONG, limit=4 if case in SLOW else 60)
    assert any(part in sentence(results) for part in expected.split("|")), results
    assert not [*temporary.iterdir()]


# --- routers: the same process, another question ---

ROUTERS = replace(TASK, parts=[replace(TASK.parts[0], router="MyRouter", replicas=2)])


def choose(body: str) -> str:
    """A router that does this before it chooses."""
    lines = "".join(f"        {line}\n" for line in [*body.splitlines(), "return min(loads)"])
    head = "from nanovllm.routing import Router\nclass MyRouter(Router):\n"
    return f"{head}    def choose(self, request, loads):\n{lines}"


HOSTILE_ROUTERS = {
    "closes everything": (
        choose("import os, time\nos.closerange(0, 100)\ntime.sleep(1000)"),
        "closed the pipe",
    ),
    "a segmentation fault": (choose("import ctypes\nctypes.string_at(0)"), "exit status -11"),
    "ends the grader": (
        choose("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(1000)"),
        f"the process that grades was ended|{NO_SUCH_PROCESS}",
    ),
    "a long line": (
        ANSWERS + choose("answers().write('[' * 2**22)\nanswers().flush()"),
        "more than 1 MiB",
    ),
    "another answer": (
        ANSWERS + choose("answers().write('{\"events\": []}\\n')\nanswers().flush()"),
        "request 0: your process has chosen what is no replica: None",
    ),
    "a slow one": (choose("import time\ntime.sleep(1)"), "more than 4 s in all"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case == "a slow one"))
        for case in HOSTILE_ROUTERS
    ],
)
def test_a_hostile_router(graded, case, temporary):
    code, expected = HOSTILE_ROUTERS[case]
    results = graded(code, ROUTERS, limit=4 if case == "a slow one" else 60)
    assert any(part in sentence(results) for part in expected.split("|")), results
    assert not [*temporary.iterdir()]


# --- texts ---

UMLAUT = "# J\u00fcrgen\n"
TEXTS = {
    "BOM": (("\ufeff" + UMLAUT + FCFS).encode(), None),
    "CRLF": (FCFS.replace("\n", "\r\n").encode(), None),
    "Latin-1 as declared": (("# coding: latin-1\n" + UMLAUT + FCFS).encode("latin-1"), None),
    "Latin-1": ((HEAD + UMLAUT + FCFS).encode("latin-1"), "not in UTF-8: see line 2"),
    "UTF-16": (FCFS.encode("utf-16"), "UTF-16: save it as UTF-8"),
    "unknown coding": (
        b"# coding: klingon\n" + FCFS.encode(),
        "encoding that Python does not know",
    ),
    "NUL": (FCFS.encode() + b"\0", "null bytes"),
    "surrogate in an error": (b"raise ValueError('\\ud800')\n", "ValueError: "),
    "surrogate in an answer": (b"ANSWERS = {'A': '\\ud800'}\n" + FCFS.encode(), None),
    "lines in an error": (
        b"raise ValueError('\\n 100.0 of  100  in all\\n\\x1b[31m\\u202e')\n",
        "ValueError: 100.0 of 100 in all [31m (line 1",
    ),
    "prints": (b"print('\\x1b[31m\\ud800' * 10**6)\nprint('the end')\n" + FCFS.encode(), None),
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


WHERE = {
    "a key that is none": (
        method("return None if request.arrival else 1", "priority", ", request"),
        "TypeError: '<' not supported between .*in .* of scheduler.py",
    ),
    "a generator": (
        method("yield self.waiting[0]", "next_waiting"),
        r"MyScheduler.next_waiting\(\): <generator object .*is not one of",
    ),
}


@pytest.mark.parametrize("case", WHERE)
def test_an_error_says_where(graded, case):
    code, expected = WHERE[case]
    assert re.search(expected, sentence(graded(code)))


# --- processes and files that stay ---

DAEMON = """
import os, signal, sys, time
def leave(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            try:
                work()
            finally:
                os._exit(0)
        os._exit(0)
def sleep():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.closerange(0, 100)
    time.sleep(1000)
def run_away():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.02)
        if os.fork():
            os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a sub-reaper")
@pytest.mark.parametrize("work", ("sleep", "run_away"))
@pytest.mark.parametrize("when", ("at the start", "in a step"))
def test_a_daemon_is_ended(graded, work, when):
    code = DAEMON + (f"leave({work})\n" + FCFS if when == "at the start" else "")
    code += method(f"leave({work})\nreturn super().schedule()") if when == "in a step" else ""
    limit = 20 * (when == "in a step")  # hundreds of them
    task = TASK if not limit else replace(TASK, parts=[few(TASK.parts[0])])
    assert graded(code, task)["score"] == 30  # the fixture looks for children


def few(part: Part) -> Part:
    return replace(part, workload=lambda seed: workload(all_at_once(), fixed(20, 10), 2))


def test_its_folder_may_become_anything(graded, tmp_path, temporary):
    """What a link points to is not touched."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("important")
    for code in (
        f"import os\nhere = os.getcwd()\nos.rmdir(here)\nos.symlink({str(kept)!r}, here)\n",
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\nos.chmod('a', 0)\n",
        "import os\nhere = os.getcwd()\nos.rmdir(here)\nopen(here, 'w')\n",
    ):
        assert graded(code + FCFS)["score"] == 30
    assert (kept / "file").read_text() == "important"
    assert not [*temporary.iterdir()]


def test_solutions_are_not_imported(graded):
    """A process imports a copy of the library."""
    for code in (
        "import tests.assignments.a1_solution\n",
        "import tutorials.assignments.grade\n",
        "import nanovllm, pathlib\nassert (pathlib.Path(nanovllm.__file__).parents[1] / 'tests').exists()\n",
    ):
        assert "Error" in sentence(graded(code + FCFS))


# --- secrets ---

LEAKS = """
import sys
class Lengths(Exception):
    pass
"""
LEAK = {
    "prints": method(
        "print('the load', [len(r.prompt_token_ids) for r in self.waiting])\nreturn super().schedule()"
    ),
    "an error": method("raise ValueError([len(r.prompt_token_ids) for r in self.waiting])"),
    "a class of its own": method("raise type('Lengths1234', (Exception,), {})('1234')"),
    "a rule": HEAD
    + "from nanovllm.schedule import ScheduleError\n"
    + method("raise ScheduleError(self, 'schedule', 'lengths 1234')"),
    "what is no decision": ANSWERS
    + method("answers().write('lengths 1234\\n')\nanswers().flush()"),
    "an unknown event": ANSWERS
    + method(
        'answers().write(\'{"events": [["lengths 1234", "0", 1]], "counts": []}\\n\')\nanswers().flush()'
    ),
    "where it hangs": method("exec(compile('while True: pass', 'lengths1234', 'exec'))"),
}


LEAKING_ROUTERS = {
    "a router prints": choose("print('the load', [len(request.prompt_token_ids)])"),
    "a router's error": choose("raise ValueError([len(request.prompt_token_ids)])"),
    "a router's choice": choose("return 'lengths 1234'"),
}
LEAK |= LEAKING_ROUTERS
SLOW_LEAKS = (
    "where it hangs",
    "a class of its own",
    "a rule",
    "an unknown event",
    "a router prints",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW_LEAKS)) for case in LEAK],
)
def test_nothing_of_a_secret_load_is_shown(graded, case):
    """The same file says it on a public seed."""
    task = ROUTERS if case in LEAKING_ROUTERS else TASK
    public = json.dumps(graded(LEAK[case], task))
    secret = json.dumps(graded(LEAK[case], task, is_secret=True))
    tell = ("1234", "ValueError: [", "the load [")
    assert any(text in public for text in tell), public
    assert not any(text in secret for text in tell), secret
    if not case.endswith("prints"):
        assert sentence(json.loads(secret)) in SECRET_SENTENCES


SECRET_SENTENCES = {f"{kind.value}; {grader.HIDDEN}" for kind in Kind}
FUNCTIONS = "".join(f"def f{i}(): raise ValueError\n" for i in range(600))
BY_LINE = FUNCTIONS + method("globals()[f'f{len(self.waiting[0].prompt_token_ids) % 600}']()")
BY_STEP = method(
    """
self.num_steps = getattr(self, "num_steps", 0) + 1
if self.num_steps > 3 + self.seen % 7:
    raise KeyError
return super().schedule()
""".strip()
)
BY_STEP += "    def add(self, request):\n        self.seen = len(request.prompt_token_ids)\n"
BY_STEP += "        super().add(request)\n"
BY_NAME = method("raise [KeyError, OSError][len(self.waiting[0].prompt_token_ids) % 2]")
BY_STATUS = method("import os\nos._exit(len(self.waiting[0].prompt_token_ids) % 100)")
TELLING = {"line": BY_LINE, "step": BY_STEP, "name": BY_NAME, "exit status": BY_STATUS}


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("by", TELLING)
def test_where_a_file_fails_says_nothing_of_a_secret_load(graded, by):
    """Two loads, two answers; but not if they are secret."""

    def report(num_tokens: int, is_secret: bool) -> dict:
        jobs = workload(all_at_once(), fixed(num_tokens, 10), 2)
        part = replace(TASK.parts[0], workload=lambda seed: jobs)
        return graded(TELLING[by], replace(TASK, parts=[part]), is_secret=is_secret)

    assert report(20, is_secret=False) != report(25, is_secret=False)
    assert report(20, is_secret=True) == report(25, is_secret=True)


def test_a_secret_load_gives_only_values(graded):
    """Not the number of steps, and of each value as many digits as the report shows."""
    code = method("return 64, 64", "step_budget")
    public, secret = graded(code), graded(code, is_secret=True)
    rules, goal = secret["tests"]
    assert rules["output"] == "all kept" and "steps" in public["tests"][0]["output"]
    value = secret["leaderboard"][0]["value"]
    assert value == pytest.approx(public["leaderboard"][0]["value"], rel=1e-3)
    assert float(f"{value:.4g}") == value and f"{value:.4g}, the worst" in goal["output"]


# --- an account of their own ---

SABOTAGE = (
    DAEMON
    + """
home = os.getcwd()
def sabotage():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open('/tmp/left by a student', 'w').write('the load')
    while os.path.exists(home):
        time.sleep(0.05)
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            time.sleep(0.1)
leave(sabotage)
"""
)


@for_root
@pytest.mark.slow
def test_nobody_hurts_the_next_one(graded, account):
    """A row of submissions of one user. In the first, a daemon waits for the next ones."""
    assert graded(SABOTAGE + FCFS, account=account)["score"] == 30
    for _ in range(2):
        slow = method("import time\ntime.sleep(0.01)\nreturn super().schedule()")
        assert graded(slow, account=account)["score"] == 30
    assert not account.processes()
    assert not os.path.exists("/tmp/left by a student")


@for_root
def test_what_another_user_cannot_do(graded, account, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cret")
    secret.chmod(0o600)
    for code in (
        f"open({str(secret)!r})\n",
        "import os\nopen(f'/proc/{os.getppid()}/mem')\n",
        "import os\nopen(f'/proc/{os.getppid()}/environ').read()\n",
        "import os\nos.kill(os.getppid(), 9)\n",
        f"open({str(ROOT / 'README.md')!r}, 'a')\n",
        "import nanovllm\nopen(nanovllm.__file__, 'a')\n",
    ):
        assert "PermissionError" in sentence(graded(code + FCFS, account=account))


@for_root
def test_accounts_that_are_refused(account, monkeypatch, tmp_path):
    entry = SimpleNamespace(pw_uid=UID, pw_gid=UID, pw_dir="/nonexistent")
    monkeypatch.setattr("pwd.getpwnam", lambda name: entry)
    assert Account.named("student") == account
    sleeper = subprocess.Popen(["sleep", "60"], user=UID, group=UID, cwd="/")
    with pytest.raises(ValueError, match=f"other processes, such as {sleeper.pid}"):
        Account.named("student")
    account.clean()
    assert sleeper.wait() == -9
    entry.pw_dir = str(tmp_path)
    os.chown(tmp_path, UID, UID)
    with pytest.raises(ValueError, match="files could stay in its home"):
        Account.named("student")
    entry.pw_dir = "/nonexistent"
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    tmp_path.chmod(0)
    monkeypatch.setattr(process.sys, "executable", str(python))
    with pytest.raises(ValueError, match="this user cannot run"):
        Account.named("student")


def test_a_system_without_accounts():
    """Windows, as far as it can be played here."""
    code = "import sys; sys.modules['pwd'] = None; import tutorials.assignments.grade"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr == "the grader needs Linux or macOS: on Windows, run it in WSL\n"


# --- all of it ---


NUM_FILES = 25  # the same with 200 takes some minutes


@pytest.mark.slow
def test_many_files_in_a_row_leave_nothing(tmp_path, temporary):
    """Good ones and bad ones, in any order: no process, no file, and the repository as it was."""
    files = {"fcfs": FCFS.encode(), "leak": LEAK["prints"].encode()}
    quick = [case for case in PROTOCOL if case not in SLOW]
    files |= {case: PROTOCOL[case][0].encode() for case in quick}
    files |= {case: code for case, (code, _) in TEXTS.items()}
    files["daemon"] = (DAEMON + "leave(sleep)\n" + FCFS).encode()
    rng, names = random.Random(7), sorted(files)
    state = repository(), children()
    graded_by = Grader(TASK, [1], limit=60)
    scores = {}
    row = [*names, *rng.choices(names, k=NUM_FILES - len(names))]
    for i, name in enumerate(rng.sample(row, k=NUM_FILES)):
        path = tmp_path / f"{i}.py"
        path.write_bytes(files[name])
        target = tmp_path / f"{i}.json"
        grade_file(graded_by, path, target)
        score = json.loads(target.read_text())["score"]
        assert scores.setdefault(name, score) == score, name
        path.unlink()
        target.unlink()
    assert scores["fcfs"] == 30 and sum(score == 0 for score in scores.values()) > 10
    assert (repository(), children()) == state
    assert [*tmp_path.iterdir()] == [temporary] and not [*temporary.iterdir()]


def repository() -> dict[str, float]:
    """When each file was changed."""
    ignored = shutil.ignore_patterns(
        "__pycache__", ".git", ".pytest_cache", ".hypothesis", "*_cache"
    )
    found = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = {*folders} - ignored(folder, folders)
        found |= {f"{folder}/{name}": os.stat(f"{folder}/{name}").st_mtime for name in names}
    return found
