"""scripts/first_contact runs without a GPU, so that no typo waits for the first minutes on one.

Run: pytest tests/tutorials/test_first_contact.py --slow
"""

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.vattention import memory as virtual_memory
from tutorials import machine
from tutorials.measure.first_contact import decode_step, options, sweep
from tutorials.measure.first_contact import section as section_of_parts
from tutorials.measure.first_contact.engine import ALLOWED_OVER, compilations, complaints
from tutorials.measure.first_contact.machine import nvidia_smi
from tutorials.measure.first_contact.section import Section
from tutorials.measure.first_contact.start import Watched

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
@pytest.mark.parametrize("name", PARTS[1:])
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


PYTHON = """#!/bin/sh
case "$*" in
    *.engine*) exit 3 ;;
    *"-k memory_stays"*) trap 'echo FAILED late; exit' INT; while true; do sleep 0.1; done ;;
    *.options*) trap '' INT; sleep 1000000 & wait; sleep 1000000 ;;
esac
"""


@pytest.mark.slow
@needs_triton
def test_a_part_that_fails_or_hangs_spares_the_others(tmp_path):
    """The limit ends a part: pytest then still says what has failed. The script says which parts failed, and how."""
    (tmp_path / "scripts").mkdir()
    script = re.sub(r"(contact options|tests memory) \d+", r"\1 1", SCRIPT)
    for name, text in (("first_contact", script.replace("after=5", "after=1")), ("python", PYTHON)):
        (tmp_path / "scripts" / name).write_text(text)
        (tmp_path / "scripts" / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path / 'scripts'}:{os.environ['PATH']}"}
    command = [str(tmp_path / "scripts" / "first_contact")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.endswith("=== failed: engine (3) options (137) memory (124)\n")
    assert done.returncode == 1 and done.stdout.count("=== ") == len(CALLS) + 1
    assert "FAILED late" in (tmp_path / "first_contact" / "memory.txt").read_text(encoding="utf-8")


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


@pytest.mark.slow
def test_parts_are_imported_without_pytest_and_beside_another_package_of_tests(tmp_path):
    """Some packages install their tests as a package `tests`, which wins over a mere folder."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    code = f"import pkgutil; sys.path.append({str(tmp_path)!r})\n"
    code += (
        f"for name in {PARTS}: pkgutil.resolve_name('tutorials.measure.first_contact.' + name)\n"
    )
    code += "import tests.tools.machines"  # as conftest.py does
    done = without([*MISSING, "pytest"], code)
    assert done.returncode == 0, done.stderr


def test_which_numpy_the_interpreter_needs(monkeypatch):
    told = "the interpreter of Triton 3.6.0 needs numpy < 2.4, and this is 2.4.6"
    for triton, numpy, expected in (
        ("3.6.0", "2.4.6", told),
        ("3.6.0", "2.3.5", None),
        ("3.7.0", "2.4.6", None),
        ("3.9.0", "2.10.0rc1", None),
        (None, "2.4.6", None),
    ):
        monkeypatch.setattr(machine, "installed", {"triton": triton, "numpy": numpy}.get)
        assert machine.interpreter_problem() == expected


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


def test_an_error_that_comes_late_is_that_of_its_case(section, monkeypatch):
    """Nothing waits for a kernel."""
    monkeypatch.setattr(section, "synchronize", partial(fail, "an illegal access"))
    section.case("bad", dict)
    assert "illegal" in json.loads(section.file.read_bytes())["cases"]["bad"]["error"]


def test_what_is_being_done_is_written_before(section):
    case = section.case("reading", lambda: json.loads(section.file.read_bytes()))
    assert case["doing"] == "reading"


@pytest.mark.parametrize("name", PARTS)
def test_cases_that_fail_spare_the_others(name, section, monkeypatch):
    """What stands between the cases must not depend on them: the last one is tried, too."""
    asked = []
    failed = lambda case, call: asked.append(case) or {"error": "it fails"}  # noqa: E731
    monkeypatch.setattr(section, "case", failed)
    module = pkgutil.resolve_name(f"tutorials.measure.first_contact.{name}")
    vars(module)[name](section)
    last = {"decode_step": "larger", "options": "vAttention", "sweep": "ceilings"}
    assert asked and asked[-1] == last.get(name, asked[-1])


def test_an_engine_that_fails_spares_the_cases_that_follow(section, monkeypatch):
    """It is there, but each of its steps raises."""
    llm = SimpleNamespace(
        requests={str(i): SimpleNamespace(sequences=[[0] * 5]) for i in range(3)},
        runner=SimpleNamespace(graphs=None),
        step=lambda report: fail(),
        abort=lambda name: True,
    )
    monkeypatch.setattr(decode_step, "decoding", lambda section: llm)
    decode_step.steps_of_engine(section)
    assert [*section.results["cases"]][-1] == "one decodes: kernels"


# --- what is measured ---


def test_calls_are_noted_with_their_results():
    owner = SimpleNamespace(double=lambda x: 2 * x, fail=fail)
    with ExitStack() as patches:
        double = Watched(patches, owner, "double")
        failing = Watched(patches, owner, "fail")
        assert owner.double(4) == 8
        with pytest.raises(RuntimeError):
            owner.fail()
    owner.double(5)  # not noted any more
    assert double.results == [8] and len(double.seconds) == 1
    assert failing.results == [] and len(failing.seconds) == 1


def test_sampling_is_timed_behind_a_pause(section, monkeypatch):
    """Or the launches of Python would be timed."""
    calls = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("pause"))
    monkeypatch.setattr(decode_step, "seconds_of", lambda call, device: calls.append(call))
    section.cpu = False
    decode_step.seconds_behind_a_pause(section, "kernels")
    assert calls == ["pause", "kernels"]


def test_the_calls_of_a_gpus_driver_are_noted(section, monkeypatch):
    """Those that map pages, by the names that vAttention uses."""
    used = re.findall(r"driver\.(cuMem\w+)", inspect.getsource(virtual_memory))
    assert {*options.PAGE_CALLS} <= {*used}
    driver = SimpleNamespace(**dict.fromkeys(options.PAGE_CALLS, lambda *arguments: arguments))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    section.cpu = False
    with options.page_calls(section) as noted:
        assert driver.cuMemMap(1, 2) == (1, 2)
    calls = options.summary(noted, steps=2)
    assert calls["cuMemMap"]["calls"] == 0.5 and calls["cuMemUnmap"] == {"calls": 0, "ms": 0}


@needs_triton
def test_the_sweep_replaces_the_tile_of_the_sampler():
    from nanovllm.layers import triton_ops

    launched = []
    kernel = {(3,): lambda *args, **options: launched.append((args, options))}
    sweep.Relaunched(kernel, 16, warps=2)[(3,)]("logits", 4096, num_warps=8)
    assert launched == [(("logits", 16), {"num_warps": 2})]
    assert [*inspect.signature(triton_ops.sample_kernel.fn).parameters][-1] == "TILE"


def test_a_slow_product_is_a_small_one(monkeypatch):
    """A CPU without instructions for a dtype multiplies a thousand times slower."""
    sizes = []

    def product_seconds(n, device, dtype, count):
        sizes.append(n)
        return [n**3 * 1e-8] * count  # 0.2 GFLOP/s

    monkeypatch.setattr(machine, "product_seconds", product_seconds)
    assert machine.best_product(torch.device("cpu"), torch.float16) == pytest.approx(2e8)
    assert max(sizes) == 256


def test_what_serving_may_not_do():
    assert complaints(over=ALLOWED_OVER, compiled=[]) == {}
    assert complaints(over=-1, compiled=None) == {}
    assert complaints(over=2**30, compiled=[]) == {"error": "1.00 GiB more than granted"}
    told = complaints(over=0, compiled=["decode", "sample"])["error"]
    assert told == "2 kernels were compiled while serving: decode"


@needs_triton
def test_compilations_are_counted():
    """By a hook whose names and arguments are Triton's."""
    import triton

    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    with compilations() as compiled:
        arguments = {"key": "", "fn": None, "compile": {}, "already_compiled": False}
        runtime.jit_post_compile_hook(repr="decode", is_manual_warmup=False, **arguments)
    assert compiled == ["decode"]
    assert runtime.jit_post_compile_hook is before


def test_the_driver_is_asked_for_clocks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho $1 >&2\necho 1980 MHz, 412.30 W\necho 345 MHz, 70.10 W\n")
    program.chmod(0o755)
    said = {"clocks.sm": "1980 MHz; 345 MHz", "power.draw": "412.30 W; 70.10 W"}
    assert nvidia_smi("clocks.sm", "power.draw") == said
    program.write_text("#!/bin/sh\necho no such field\nexit 2\n")
    assert nvidia_smi("clocks.sm") == {"nvidia_smi": "no such field"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert nvidia_smi("clocks.sm") == {}
