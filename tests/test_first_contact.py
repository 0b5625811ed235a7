"""The program for the first minutes on a GPU runs without one, so that no typo waits for that day.

Run: pytest tests/test_first_contact.py --slow
"""

import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tutorials.performance import machine
from tutorials.performance.first_contact.apart import (
    PACKAGE,
    SECTIONS,
    Job,
    job_of,
    number_of,
    run_apart,
)
from tutorials.performance.first_contact.section import Section
from tutorials.performance.first_contact.section import run as run_program

ROOT = Path(__file__).parent.parent


def sections(*names: str) -> list[dict]:
    """What the command has written with --cpu, and a thousand minutes of time."""
    numbers = ",".join(str(number_of(name)) for name in names)
    with TemporaryDirectory() as folder:
        options = ["--cpu", "--sections", numbers, "--out", folder, "--minutes", "1000"]
        command = [sys.executable, "-m", PACKAGE, *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        jobs = [job_of(name, Path(folder), 0, cpu=True) for name in names]
        assert {job.path for job in jobs} == set(Path(folder).iterdir())
        return [json.loads(job.path.read_text()) for job in jobs]


def check(results: dict) -> None:
    assert results["cases"] and results["skipped"] == []
    assert not {"error", "doing"} & results.keys()


def test_the_machine_is_measured_on_a_cpu():
    (results,) = sections("machine")
    check(results)
    assert results["cases"]["ceilings"]["flops_per_second"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter runs on Linux")
@pytest.mark.parametrize("name", list(SECTIONS)[1:])
def test_a_section_runs_on_a_cpu(name):
    (results,) = sections(name)
    check(results)


def test_every_section_says_what_it_is():
    for name in SECTIONS:
        assert pkgutil.resolve_name(job_of(name, ROOT, 0, cpu=True).function).__doc__


def endless(section: Section) -> None:
    """A section that does not end."""
    section.case("sleeping", lambda: time.sleep(10**6))


def crash(section: Section) -> None:
    """A section whose process ends itself."""
    section.case("crashing", os.abort)


def job(function, path: Path, seconds: float) -> Job:
    name = f"{function.__module__}:{function.__name__}"
    return Job(name, path / "x.json", time.time() + seconds, cpu=True)


def test_who_is_ended_by_the_clock_is_told_so(tmp_path):
    late = job(endless, tmp_path, seconds=0)
    results = run_apart(late, grace=1)
    told = r"section 'endless' was ended by the clock after \d+ seconds, while it was at '.+'"
    assert re.fullmatch(told, results["error"])
    assert json.loads(late.path.read_text())["error"] == results["error"]
    assert list(tmp_path.iterdir()) == [late.path]


@pytest.mark.slow
def test_who_crashes_is_told_where(tmp_path):
    results = run_apart(job(crash, tmp_path, seconds=10**6))
    told = "section 'crash' was ended by SIGABRT, while it was at 'crashing'"
    assert results["error"] == told


def test_what_is_being_done_is_written_before(tmp_path):
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    section.case("reading", lambda: json.loads(section.job.path.read_text()))
    assert section.cases["reading"]["doing"] == "reading"


def test_after_its_deadline_a_section_skips(tmp_path):
    section = Section(job(endless, tmp_path, seconds=-1), tmp_path)
    section.case("late", lambda: {})
    assert json.loads(section.job.path.read_text())["skipped"] == ["late"]


def test_a_program_is_ended_by_the_clock():
    result = run_program([sys.executable, "-c", "import time; time.sleep(10**6)"], seconds=1)
    assert re.match(r"ended by the clock after \d+ seconds: .+ -c", result["error"])


def test_a_slow_product_is_a_small_one(monkeypatch):
    """A CPU without instructions for a dtype multiplies a thousand times slower."""
    sizes = []

    def product_seconds(n, device, dtype, count):
        sizes.append(n)
        return [n**3 * 1e-8] * count  # 0.2 GFLOP/s

    monkeypatch.setattr(machine, "product_seconds", product_seconds)
    assert machine.best_product(torch.device("cpu"), torch.float16) == pytest.approx(2e8)
    assert max(sizes) == 256
