"""A submission ends with all that it has started, and leaves nothing for the next one: with namespaces of its own, and
where the system has none.

Run: pytest tests/course/test_walls.py [--slow] [-k chain]
"""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from submissions import FCFS, TASK, for_root, sentence

from tutorials.assignments import descendants, grader
from tutorials.assignments.grader import Grader
from tutorials.assignments.kernel_objects import NUMBERS, owned_by
from tutorials.assignments.process import copy_library
from tutorials.assignments.walls import can_separate
from tutorials.simulation.workloads import all_at_once, fixed, workload

pytestmark = [
    pytest.mark.usefixtures("impatient"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces and sub-reapers"),
]
# few steps: most of these files are slow
FEW = replace(
    TASK,
    parts=[replace(TASK.parts[0], workload=lambda seed: workload(all_at_once(), fixed(20, 10), 2))],
)


@pytest.fixture
def namespaces() -> None:
    if not can_separate():
        pytest.skip("this user can make no namespaces here")


@pytest.fixture
def no_namespaces(monkeypatch) -> None:
    """Another machine: walls.py, as students' processes run it, finds none."""

    def copy(folder: Path) -> None:
        copy_library(folder)
        walls = folder / "library" / "walls.py"
        text = walls.read_text()
        assert "if can_separate():" in text
        walls.write_text(text.replace("if can_separate():", "if False:"))

    monkeypatch.setattr(grader, "copy_library", copy)


@pytest.fixture(params=["namespaces", "no_namespaces"])
def walls(request) -> str:
    request.getfixturevalue(request.param)
    return request.param


# --- files ---

DEEP = """
import os
def deepen(folder):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    for _ in range(2100):
        os.mkdir("folder")
        os.chdir("folder")
    os.chdir("/")
"""


def test_deep_folders_stop_no_grading(graded, temporary):
    assert graded(DEEP + "deepen(os.getcwd())\n" + FCFS, FEW)["score"] == 30
    assert graded(FCFS, FEW)["score"] == 30
    assert not [*temporary.iterdir()]


@for_root
def test_deep_folders_elsewhere(graded, account):
    """Also in a folder of somebody else in which everybody may write."""
    inside = Path("/tmp") / f"of everybody {os.getpid()}"
    inside.mkdir()
    inside.chmod(0o777)
    deep = [Path(f"/tmp/deep {os.getpid()}"), inside / "deep"]
    # the file is loaded twice
    calls = "".join(f"if not os.path.exists('{path}'):\n    deepen('{path}')\n" for path in deep)
    try:
        assert graded(DEEP + calls + FCFS, FEW, account=account)["score"] == 30
        assert not any(path.exists() for path in deep)
    finally:
        inside.rmdir()


# --- what is no file ---

MESSAGE = """
import ctypes
libc = ctypes.CDLL(None)
queue = libc.msgget(0x77, 0o1666)
received = ctypes.create_string_buffer(64)
if libc.msgrcv(queue, received, 50, 0, 0o4000) > 0:
    raise ValueError(received.raw[8:40])
"""
SENDS = "libc.msgsnd(queue, (1).to_bytes(8, 'little') + b'prompt lengths 1 2 3'.ljust(50), 50, 0)\n"
SHARED_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
for _ in range(3):
    libc.shmget(0, 2**20, 0o1600)
libc.semget(0x78, 1, 0o1666)
"""
KEYS = """
import ctypes, platform
NUMBERS = {"x86_64": (248, 250), "aarch64": (217, 219)}
add_key, keyctl = NUMBERS.get(platform.machine(), (-1, -1))
libc = ctypes.CDLL(None)
SEARCH, USER_KEYRING = 10, -4
if libc.syscall(keyctl, SEARCH, USER_KEYRING, b"user", b"to the next", 0) > 0:
    raise ValueError("prompt lengths 1 2 3")
"""
SENDS_KEY = 'libc.syscall(add_key, b"user", b"to the next", b"1 2 3", 5, USER_KEYRING)\n'


@for_root
@pytest.mark.parametrize("channel", [(MESSAGE, SENDS), (KEYS, SENDS_KEY)], ids=["message", "key"])
def test_no_message_reaches_the_next_one(graded, account, walls, channel):
    receives, sends = channel
    once = "import os\nif os.path.exists('sent'):\n    raise SystemExit\n"
    for _ in range(2):
        results = graded(receives + FCFS, FEW, account=account)
        assert results["score"] == 30, results
        graded(once + receives + sends + FCFS, FEW, account=account)
    assert not any(owned_by(account.uid, kind) for kind in NUMBERS)


@for_root
def test_shared_memory_does_not_outlive_its_file(graded, account, walls):
    assert graded(SHARED_MEMORY + FCFS, FEW, account=account)["score"] == 30
    assert not any(owned_by(account.uid, kind) for kind in NUMBERS)


def test_without_an_account_a_namespace_keeps_it(graded, namespaces):
    before = {kind: owned_by(os.getuid(), kind) for kind in NUMBERS}
    assert graded(SHARED_MEMORY + FCFS, FEW)["score"] == 30
    assert {kind: owned_by(os.getuid(), kind) for kind in NUMBERS} == before


def test_there_is_no_network(graded, namespaces):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n"
        assert "unreachable" in sentence(graded(code + FCFS, FEW))


# --- processes ---

CHAIN = """
import os, time
def run_away():
    os.setsid()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if os.fork():
                os._exit(0)
        except OSError:  # there are too many
            continue
for _ in range(20):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        run_away()
        os._exit(0)
"""
ENDED = "your file has started processes that could not be ended"


@pytest.mark.slow
def test_chains_of_processes_are_ended(graded, walls):
    """Each process only starts the next one, and ends. The fixture looks for those that are left."""
    results = graded(CHAIN + FCFS, FEW)
    assert results["score"] == 30 or sentence(results) == ENDED
    assert graded(FCFS, FEW)["score"] == 30


@for_root
@pytest.mark.slow
def test_chains_of_an_account_are_ended(graded, account, walls):
    results = graded(CHAIN + FCFS, FEW, account=account)
    assert results["score"] == 30 or sentence(results) == ENDED
    assert not account.processes()
    assert graded(FCFS, FEW, account=account)["score"] == 30


def test_what_cannot_be_ended_stops_no_grading(graded, no_namespaces, monkeypatch):
    """Played: the processes are too fast for the job that has started them. The grader gets them."""
    grading = os.getpid()

    def end_all(pids: set[int]) -> None:
        if os.getpid() == grading:
            descendants_end_all(pids)

    descendants_end_all = descendants.end_all
    monkeypatch.setattr(descendants, "SECONDS_TO_END", 0.3)
    monkeypatch.setattr(descendants, "end_all", end_all)
    leaves = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    assert sentence(graded(leaves + FCFS, FEW)) == ENDED
    assert graded(FCFS, FEW)["score"] == 30


MANY = """
import os, time
count = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError:
    raise ValueError(f"{count < 100}") from None
"""


@for_root
def test_an_account_has_a_number_of_processes(graded, account, walls):
    assert "ValueError: True" in sentence(graded(MANY + FCFS, FEW, account=account))
    assert graded(FCFS, FEW, account=account)["score"] == 30


# --- a row of them ---


def test_a_grader_goes_on_with_the_next_file(tmp_path, temporary):
    graded_by = Grader(FEW, [1])
    for name, code in (("deep", DEEP + "deepen(os.getcwd())\n" + FCFS), ("next", FCFS)):
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        assert graded_by.grade(path).score == 30
    assert not [*temporary.iterdir()]
