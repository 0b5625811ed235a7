"""What the tests rest on: a failed test keeps no engine alive, a simulated machine reaches each process, GPUs are hidden,
the book is left out unless it is named, and a missing extra skips only the tests that need it.

Run: pytest tests/house/test_framework.py [--slow]
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rooms
import torch

from tests.tools.extras import EXTRAS, File, needs

ROOT = Path(__file__).parents[2]
INNER = """
import gc, signal, subprocess, sys, weakref
import torch

class Engine:
    pass

engines = []

def use(engine):
    assert engine is None

def test_that_fails():
    engine = Engine()
    engines.append(weakref.ref(engine))
    use(engine)

def test_that_comes_next():
    gc.collect()
    assert engines[0]() is None

def test_ctrl_c_is_heard():
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

def test_the_machine():
    code = "import torch; print(torch.cpu._is_avx512_bf16_supported())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(torch.cpu._is_avx512_bf16_supported()) == "{expected}"
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("machine, expected", [("plain", "False")])
def test_a_run_of_tests(tmp_path, machine, expected):
    """On a simulated machine, started as a job in the background is."""
    file = tmp_path / "test_inner.py"
    file.write_text(INNER.replace("{expected}", expected))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--machine", machine, "--rootdir", str(tmp_path), str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    text = done.stdout + done.stderr
    assert "1 failed, 3 passed" in text and "test_that_fails" in text, text
    assert re.search(r"\d s of processor time", text)


def test_gpus_are_hidden_unless_they_are_asked_for(pytestconfig):
    """Most tests are about a CPU, and would take a GPU as the default device."""
    if pytestconfig.getoption("--gpu"):
        pytest.skip("--gpu is given")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1" and torch.cuda.device_count() == 0


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


@pytest.mark.parametrize("module", EXTRAS)
def test_a_file_without_its_module_is_skipped(module, request, tmp_path, monkeypatch):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (requirements,) = re.findall(rf"^{EXTRAS[module]} = (.*)", project, re.MULTILINE)
    assert re.search(rf'"{module.replace("_", "-")}\b', requirements)
    path = tmp_path / "test_inner.py"
    path.write_text(f"from {module} import something\ndef test_a(): pass")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pytest.skip.Exception, match=f"needs the extra '{EXTRAS[module]}'"):
        File.from_parent(request.session, path=path).collect()
    with pytest.raises(pytest.skip.Exception, match=f"needs the extra '{EXTRAS[module]}'"):
        needs(module)


def test_a_file_with_another_error_is_not_skipped(request, tmp_path):
    path = tmp_path / "test_inner.py"
    path.write_text("import nothing_of_this_name")
    with pytest.raises(File.CollectError):
        File.from_parent(request.session, path=path).collect()
