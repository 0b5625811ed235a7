"""The program for the first minutes on a GPU runs without one, so that no typo waits for that day.

Run: pytest tests/tutorials/test_first_contact.py --slow
"""

import inspect
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from measure.first_contact import decode_step, options, start, sweep, tests
from measure.first_contact.apart import GRACE, interpreter_problem, run_apart
from measure.first_contact.engine import ALLOWED_OVER, compilations, complaints
from measure.first_contact.job import (
    MINUTES,
    PACKAGE,
    SECTIONS,
    Job,
    job_of,
    number_of,
)
from measure.first_contact.machine import nvidia_smi
from measure.first_contact.section import (
    PATIENCE,
    DeviceLostError,
    Section,
    interrupted,
)
from measure.first_contact.section import run as run_program
from nanovllm.config import Config
from nanovllm.device import memory
from nanovllm.model_runner import ModelRunner
from nanovllm.vattention import memory as virtual_memory
from tutorials import machine

ROOT = Path(__file__).parents[2]
PROBLEM = interpreter_problem(machine.installed("triton"), machine.installed("numpy"))


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


@pytest.mark.slow
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_the_machine_is_measured_on_a_cpu():
    (results,) = sections("machine")
    check(results)
    assert results["cases"]["ceilings"]["flops_per_second"] > 0


@pytest.mark.slow
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter runs on Linux")
@pytest.mark.parametrize("name", [*SECTIONS][1:-1])  # the last one runs what needs a GPU
def test_a_section_runs_on_a_cpu(name):
    (results,) = sections(name)
    check(results)


def test_every_section_says_what_it_is():
    for name in SECTIONS:
        assert pkgutil.resolve_name(job_of(name, ROOT, 0, cpu=True).function).__doc__


def test_the_sections_share_the_time_and_end_within_ten_minutes():
    assert sum(SECTIONS.values()) == MINUTES * 60
    assert MINUTES * 60 + GRACE < 10 * 60 and PATIENCE < GRACE


SERVER = ["fastapi", "httpx", "openai", "prometheus_client", "ray", "starlette", "uvicorn"]
MISSING = [*SERVER, "hypothesis", "matplotlib"]  # on a machine that is lent for some minutes


def without(modules: list[str], code: str) -> subprocess.CompletedProcess:
    """What a program says where these modules are not installed."""
    missing = f"import sys; sys.modules |= dict.fromkeys({modules})\n"
    program = [sys.executable, "-c", missing + code]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [tests.alone(), tests.others()], ids=["alone", "others"])
def test_the_tests_of_a_gpu_are_collected_without_extras(arguments, monkeypatch):
    """Without other files, which would be skipped, or end the collection."""
    options = ["--collect-only", "-p", "no:cacheprovider", *arguments]
    if "-n" in arguments:
        options += ["-p", "xdist.plugin"]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis is one
    done = without(MISSING, f"import pytest; sys.exit(pytest.main({options}))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED" not in done.stdout
    assert (tests.ALONE in done.stdout) == (arguments == tests.alone())


@pytest.mark.slow
def test_sections_are_imported_without_pytest_and_beside_another_package_of_tests(tmp_path):
    """Some packages install their tests as a package `tests`, which wins over a mere folder."""
    foreign = tmp_path / "tests"
    foreign.mkdir()
    (foreign / "__init__.py").touch()
    names = [job_of(name, ROOT, 0, cpu=True).function for name in SECTIONS]
    code = f"import pkgutil; sys.path.append({str(tmp_path)!r})\n"
    code += f"for name in {names}: assert pkgutil.resolve_name(name).__doc__\n"
    code += "import tests.tools.machines"  # as conftest.py does
    done = without([*MISSING, "pytest"], code)
    assert done.returncode == 0, done.stderr


def test_which_numpy_the_interpreter_needs():
    told = "the interpreter of Triton 3.6.0 needs numpy < 2.4, and this is 2.4.6"
    assert interpreter_problem("3.6.0", "2.4.6") == told
    for versions in (("3.6.0", "2.3.5"), ("3.7.0", "2.4.6"), ("3.9.0", "2.10.0rc1")):
        assert interpreter_problem(*versions) is None
    assert interpreter_problem(None, "2.4.6") is None


def endless(section: Section) -> None:
    """A section that does not end."""
    section.case("sleeping", lambda: time.sleep(10**6))


def crash(section: Section) -> None:
    """A section whose process ends itself."""
    section.case("crashing", os.abort)


def leave_a_child(section: Section) -> None:
    """A section whose process ends itself, but not what it has started."""
    command = [sys.executable, "-c", "import time; time.sleep(10**6)"]
    section.case("starting", lambda: {"child": subprocess.Popen(command).pid})
    section.case("crashing", os.abort)


def is_running(process_id: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"  # ended, but nobody has asked how
    return False


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_who_has_ended_leaves_nobody_behind(tmp_path):
    """A worker that compiles for a section would keep its memory of the GPU."""
    results = run_apart(job(leave_a_child, tmp_path, seconds=10**6))
    child = results["cases"]["starting"]["child"]
    end = time.time() + 60
    while is_running(child) and time.time() < end:
        time.sleep(0.01)
    is_left = is_running(child)
    if is_left:
        os.kill(child, signal.SIGKILL)
    assert not is_left


def fail(message: str = "it fails"):
    raise RuntimeError(message)


def test_a_case_that_fails_spares_the_others(tmp_path):
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    section.case("bad", fail)
    section.case("no JSON", lambda: {"a set": {1}})
    section.case("good", lambda: {"x": 1})
    assert section.results["error"] == "bad: RuntimeError: it fails"
    written = json.loads(section.job.path.read_text())["cases"]
    assert written["good"] == {"x": 1} and "error" in written["no JSON"]


def test_a_section_ends_when_its_device_is_lost(tmp_path, monkeypatch):
    """After an illegal access CUDA gives the same error for whatever is asked of it."""
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    text = "CUDA error: an illegal memory access was encountered\nSearch for ..."
    monkeypatch.setattr(section, "synchronize", partial(fail, text))
    told = "in 'bad' .CUDA error: an illegal memory access was encountered.: nothing was tried"
    with pytest.raises(DeviceLostError, match=told):
        section.case("bad", lambda: {})  # the error comes late: nothing waits for a kernel
    assert "illegal" in json.loads(section.job.path.read_text())["cases"]["bad"]["error"]


def lose(section: Section) -> None:
    """A section that loses its device."""
    section.synchronize = partial(fail, "CUDA error: gone")
    section.case("bad", fail)
    section.case("after it", lambda: {})


@pytest.mark.slow
def test_who_has_lost_its_device_says_so_in_one_sentence(tmp_path):
    results = run_apart(job(lose, tmp_path, seconds=10**6))
    assert list(results["cases"]) == ["bad"]
    told = "the device has been lost in 'bad' (CUDA error: gone): nothing was tried after it"
    assert results["error"] == told


@pytest.mark.parametrize("name", SECTIONS)
def test_cases_that_fail_spare_the_others(name, tmp_path, monkeypatch):
    """If a case may fail, what stands between the cases must not depend on it."""
    asked = []

    def failed(section: Section, case: str, call) -> None:
        asked.append(case)
        section.cases[case] = {"error": "RuntimeError: it fails"}

    monkeypatch.setattr(Section, "case", failed)
    one = job_of(name, tmp_path, time.time() + 10**6, cpu=True)
    section = Section(one, tmp_path)
    pkgutil.resolve_name(one.function)(section)
    assert asked and section.cases.keys() == {*asked}


def test_an_engine_that_fails_spares_the_cases_that_follow(tmp_path, monkeypatch):
    """It is there, but each of its steps raises."""
    asked = []

    def noted(section: Section, case: str, call) -> None:
        asked.append(case)
        try:
            section.cases[case] = call()
        except (RuntimeError, AttributeError):  # this engine has nothing but steps
            section.cases[case] = {"error": "RuntimeError: it fails"}

    llm = SimpleNamespace(
        requests={str(i): SimpleNamespace(sequences=[[0] * 5]) for i in range(3)},
        runner=SimpleNamespace(graphs=None),
        step=lambda report: fail(),
        abort=lambda name: True,
    )
    monkeypatch.setattr(Section, "case", noted)
    monkeypatch.setattr(decode_step, "decoding", lambda section: llm)
    monkeypatch.setattr(decode_step, "larger_step", lambda section: {})
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    decode_step.steps_of_engine(section)
    assert asked[-1] == "kernels of one"


def test_a_table_that_cannot_be_printed_spares_the_cases_that_follow(tmp_path, capsys):
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    section.show("a|b", [("b", ",.1f")], {"row": {"b": "no number"}})
    assert "ValueError" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "program, patience, said",
    [
        ("trap 'echo FAILED late; exit' INT; echo ready; while true; do sleep 0.1; done", 60, True),
        ("trap '' INT; echo ready; sleep 1000000 & wait", 0.1, False),
    ],
    ids=["ends", "goes on"],
)
def test_a_program_that_is_interrupted_still_says_what_has_failed(program, patience, said):
    """As pytest does. One that goes on is ended, with what it has started."""
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(["sh", "-c", program], **options) as process:
        assert process.stdout.readline() == "ready\n"
        assert interrupted(process, patience) == "FAILED late\n" * said


def test_failures_are_kept_however_much_follows():
    lines = ["[gw0] FAILED test_x.py::test_y", "ERROR test_z.py", *map(str, range(100))]
    result = run_program([sys.executable, "-c", f"print(*{lines}, sep='\\n')"], seconds=10**6)
    assert result["failures"] == lines[:2] and result["tail"] == lines[-60:]


def test_sampling_is_timed_behind_a_pause(tmp_path, monkeypatch):
    """Or the launches of Python would be timed."""
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    calls = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("pause"))
    monkeypatch.setattr(decode_step, "seconds_of", lambda call, device: calls.append(call))
    section.cpu = False
    decode_step.seconds_behind_a_pause(section, "kernels")
    assert calls == ["pause", "kernels"]


def test_the_calls_of_a_gpus_driver_are_noted(tmp_path, monkeypatch):
    """Those that map pages, by the names that vAttention uses."""
    used = re.findall(r"driver\.(cuMem\w+)", inspect.getsource(virtual_memory))
    assert {*options.PAGE_CALLS} <= {*used}
    driver = SimpleNamespace(**dict.fromkeys(options.PAGE_CALLS, lambda *arguments: arguments))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    section = Section(job(endless, tmp_path, seconds=10**6), tmp_path)
    section.cpu = False
    with options.page_calls(section) as seconds:
        assert driver.cuMemMap(1, 2) == (1, 2)
    driver.cuMemMap(3, 4)  # not noted any more
    calls = options.summary(seconds, steps=2)
    assert calls["cuMemMap"]["calls"] == 0.5 and calls["cuMemUnmap"] == {"calls": 0, "ms": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
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


def test_the_trials_that_size_the_cache_are_not_slowed(monkeypatch):
    """Triton compiles in them, in Python: with a profile on, the start would seem to take longer."""
    watchers = []
    answers = {
        "mem_get_info": (800, 1000),
        "memory_reserved": 50,
        "max_memory_reserved": 70,
        "empty_cache": None,
        "synchronize": None,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

    def trial(*_) -> int:
        watchers.append(sys.getprofile())
        return 30

    monkeypatch.setattr(ModelRunner, "run", trial)
    monkeypatch.setattr(memory, "graph_memory", trial)

    def fit(runner, config: Config) -> int:
        run_largest = partial(ModelRunner.run, runner, None)
        return memory.memory_left(torch.device("cuda"), config, 1, run_largest, lambda: None)

    terms: dict[str, int] = {}
    fit = start.noting_terms(fit, terms)
    assert fit(None, Config(gpu_memory_utilization=0.5)) == 500 - 150 - 70 - 30
    assert watchers == [None, None]
    expected = {"granted": 500, "total": 1000, "others": 150, "peak": 70, "graphs": 30}
    assert terms.items() >= expected.items()


def test_what_serving_may_not_do():
    assert complaints(over=ALLOWED_OVER, compiled=[]) == {}
    assert complaints(over=-1, compiled=None) == {}
    assert complaints(over=2**30, compiled=[]) == {"error": "1.00 GiB more than granted"}
    told = complaints(over=0, compiled=["decode", "sample"])["error"]
    assert told == "2 kernels were compiled while serving: decode"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
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
