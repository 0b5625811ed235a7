"""Machines that are played, and what the tests themselves rest on: another machine reaches each process, a failed test
keeps no engine alive, and a job in the background hears Ctrl-C.

Run: pytest tests/house/test_machines.py
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tools.machines import MACHINES

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
    code = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_the_machine():
    code = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = torch.backends.cpu.get_cpu_capability(), torch.cpu._is_avx512_bf16_supported()
    assert found.stdout.split() == [str(part) for part in ours] == {expected!r}
"""


def run_inner(tmp_path, machine: str, expected: list[str]) -> str:
    """What pytest prints of INNER, on a played machine, started as a job in the background is."""
    file = tmp_path / "test_inner.py"
    file.write_text(INNER.replace("{expected!r}", repr(expected)))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--machine", machine, "--rootdir", str(tmp_path), str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    return done.stdout + done.stderr


def processor() -> str:
    return torch.backends.cpu.get_cpu_capability()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.skipif(not processor().startswith("AVX"), reason="there is no AVX2 to be played")
def test_a_played_machine(tmp_path):
    text = run_inner(tmp_path, "plain", ["AVX2", "False"])
    assert "1 failed, 3 passed" in text, text
    assert "test_that_fails" in text
    assert "machine: plain, played: AVX2, without AVX-512" in text


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_bfloat16_is_reported_everywhere(tmp_path):
    text = run_inner(tmp_path, "bf16", [processor(), "True"])
    assert "1 failed, 3 passed" in text, text


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="sched_setaffinity is Linux's")
def test_one_core_and_busy_ones(tmp_path):
    """In a process that plays both, one after the other: it has one core, and another process that computes."""
    code = (
        "import os\n"
        "from tests.tools import machines\n"
        "machines.play('one-core', is_worker=False)\n"
        "assert len(os.sched_getaffinity(0)) == 1\n"
        "machines.keep_busy()\n"
        "children = open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read().split()\n"
        "assert len(children) == os.cpu_count()\n"
        "print(*children)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for pid in found.stdout.split():
        assert not Path(f"/proc/{pid}").exists()  # it has ended with the process that started it


@pytest.mark.slow
def test_elsewhere():
    """In a process that plays it, and in one that this one starts: the same is missing, and the example runs."""
    code = (
        "import multiprocessing, os, signal, sys\n"
        "from importlib.util import find_spec\n"
        "from pathlib import Path\n"
        "missing = [hasattr(os, 'fork'), hasattr(signal, 'SIGKILL'), Path('/proc/self').exists()]\n"
        "assert not any([*missing, find_spec('triton'), find_spec('resource')]), missing\n"
        "assert multiprocessing.get_start_method() == 'spawn'\n"
        "assert open(os.devnull).encoding != 'utf-8'\n"
    )
    play = "from tests.tools import machines; machines.play('elsewhere', is_worker=False)\n"
    inner = f"import subprocess; subprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    example = "subprocess.run([sys.executable, 'example.py'], check=True, stdout=subprocess.PIPE)\n"
    done = subprocess.run(
        [sys.executable, "-c", play + code + inner + example],
        cwd=ROOT,
        env=os.environ | {"PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_machine_cannot_be_chosen_too_late():
    from tests.tools import machines

    with pytest.raises(machines.CannotBePlayed, match="PyTorch has been imported before"):
        machines.play("plain", is_worker=False)
    assert all(machine.meaning for machine in MACHINES.values())


def test_gpus_are_hidden_unless_they_are_asked_for(pytestconfig):
    """Most tests are about a CPU, and would take a GPU as the default device."""
    if pytestconfig.getoption("--gpu"):
        pytest.skip("--gpu is given")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1" and torch.cuda.device_count() == 0
