"""scripts/first_contact runs without a GPU, so that no typo waits for the first minutes on one.

Run: pytest tests/tutorials/test_first_contact.py --slow
"""

import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tutorials import machine
from tutorials.measure.first_contact import section as section_of_parts
from tutorials.measure.first_contact.section import Section

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "scripts" / "first_contact").read_text(encoding="utf-8")
CALLS = re.findall(r"^(contact|tests|benchmark|part) (\w+) (\d+)", SCRIPT, re.MULTILINE)
PARTS = [name for kind, name, _ in CALLS if kind == "contact"]
PROBLEM = machine.interpreter_problem()
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="it needs Triton")


def check_results(path: Path) -> None:
    results = json.loads(path.read_bytes())
    assert results["cases"] and not {"error", "doing"} & results.keys()


@pytest.mark.slow
@needs_triton
def test_the_script_runs_a_part_on_a_cpu(tmp_path):
    command = ["scripts/first_contact", "--cpu", "machine"]
    environ = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("=== failed: nothing\n"), done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"machine.json", "machine.txt"}
    check_results(tmp_path / "machine.json")


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@pytest.mark.parametrize("name", ["engine"])  # the others take minutes, and are like it
def test_a_part_runs_on_a_cpu(name, tmp_path, monkeypatch):
    """In this process, which has imported PyTorch."""
    file = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [name, str(file), "--cpu"])
    monkeypatch.setattr(section_of_parts, "gc", SimpleNamespace(freeze=int, unfreeze=int, collect=int))  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        section_of_parts.run(pkgutil.resolve_name(f"tutorials.measure.first_contact.{name}:{name}"))
    assert not ended.value.code
    check_results(file)


def test_the_parts_take_nine_minutes_together():
    assert sum(int(seconds) for _, _, seconds in CALLS) == 9 * 60


MISSING = (
    "fastapi httpx openai prometheus_client ray starlette uvicorn hypothesis matplotlib".split()
)


def without(modules: list[str], code: str) -> subprocess.CompletedProcess:
    """What a program says where these modules are not installed."""
    missing = f"import sys; sys.modules |= dict.fromkeys({modules})\n"
    program = [sys.executable, "-c", missing + code]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@needs_triton
def test_the_tests_of_a_gpu_are_collected_without_extras(monkeypatch):
    """Other files would be skipped, or end the collection."""
    names = re.findall(r"tests/(\w+)/test_(?:\{([\w,]+)\}|(\w+))\.py", SCRIPT)
    files = {f"tests/{room}/test_{name}.py" for room, many, one in names for name in (many or one).split(",")}  # fmt: skip
    assert len(files) == 6 and all((ROOT / file).exists() for file in files)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis is one
    arguments = ["--collect-only", "-p", "no:cacheprovider", "--slow", *sorted(files)]
    done = without(MISSING, f"import pytest; sys.exit(pytest.main({arguments}))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED" not in done.stdout and "memory_stays" in done.stdout


# --- the cases of a part ---


@pytest.fixture
def section(tmp_path) -> Section:
    return Section(tmp_path / "x.json", cpu=True, folder=tmp_path)


def fail(message: str = "it fails"):
    raise RuntimeError(message)


def test_a_case_that_fails_spares_the_others(section):
    section.case("bad", fail)
    section.case("no JSON", lambda: {"a set": {1}})
    assert section.case("good", lambda: {"x": 1}) == {"x": 1}
    assert section.results["error"] == "bad: RuntimeError: it fails"
    written = json.loads(section.file.read_bytes())["cases"]
    assert written["good"] == {"x": 1} and "error" in written["no JSON"]


# --- what is measured ---
