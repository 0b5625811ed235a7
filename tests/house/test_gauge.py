"""What a run of tests costs is counted, and a limit makes it fail. Which rooms run without a path.

Run: pytest tests/house/test_gauge.py [--slow]
"""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rooms
from gauge import REFERENCE_LOOP, Gauge

ROOT = Path(__file__).parents[2]
INNER = """
import subprocess, sys, time

LOOP = "import time; begin = time.process_time()\\nwhile time.process_time() < begin + 0.5: pass"

def test_a_loop():
    exec(LOOP)

def test_a_loop_in_another_process():
    subprocess.run([sys.executable, "-c", LOOP], check=True)

def test_a_wait():
    time.sleep(0.5)
"""


def run_pytest(*arguments: str, cwd: Path = ROOT) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_above_the_limit_fails(tmp_path):
    file = tmp_path / "test_inner.py"
    file.write_text(INNER)
    pytest.importorskip("xdist")
    inner = ["-p", "conftest", "--rootdir", str(tmp_path), str(file), "-n", "2"]
    code, text = run_pytest(*inner, "--cpu-limit", "0.5")
    assert code == pytest.ExitCode.TESTS_FAILED and "3 passed" in text, text
    costs = {name: float(cost) for cost, name in re.findall(r"^ *([\d.]+)  .*::(\w+)$", text, re.M)}
    assert costs["test_a_loop"] >= 0.5 and costs["test_a_loop_in_another_process"] >= 0.5
    assert costs["test_a_wait"] < 0.2
    assert list(costs)[-1] == "test_a_wait"  # the dearest first


def gauge_of(limit: float | None, seconds: float, loop: float) -> Gauge:
    gauge = Gauge(limit)
    gauge.total = seconds
    gauge.loops = [loop, loop]
    return gauge


def test_a_slower_machine_may_take_longer():
    assert gauge_of(None, 100, REFERENCE_LOOP).reference_seconds == pytest.approx(100)
    slow = gauge_of(240, 400, 2 * REFERENCE_LOOP)
    assert slow.reference_seconds == pytest.approx(200) and not slow.is_above
    assert gauge_of(240, 400, REFERENCE_LOOP).is_above
    assert not gauge_of(None, 400, REFERENCE_LOOP).is_above


@pytest.mark.parametrize(
    "given, wants_all, is_left_out, first",
    [
        (["tests"], False, True, "tests"),
        (["tests"], True, False, "tutorials/assignments"),
        (["tests/course"], False, False, "tests/course"),
    ],
)
def test_the_book_is_left_out_unless_it_is_named(given, wants_all, is_left_out, first):
    sources = pytest.Config.ArgsSource
    config = SimpleNamespace(
        args=given,
        args_source=sources.TESTPATHS if given == ["tests"] else sources.ARGS,
        ArgsSource=sources,
        option=SimpleNamespace(all=wants_all),
    )
    rooms.choose(config)
    assert config.args[0] == first
    for room in ("course", "simulator", "tutorials"):
        assert rooms.is_left_out(ROOT / "tests" / room, config) == is_left_out
    assert not rooms.is_left_out(ROOT / "tests" / "core", config)
