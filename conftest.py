"""Settings for all tests; pytest reads this file first.

`pytest` runs what a change of the engine can break. `pytest --all` runs the rooms of the book and
the course, too, and `pytest tests/course` one of them. What is marked slow is left out: by
`@pytest.mark.slow` a test, by `@pytest.mark.slow(but_every=5)` all but every fifth of its variants.
`--slow` runs it. So does the variable SOLUTION, with which students say what the public tests look
at. `--machine NAME` simulates another machine (tests/tools/machines.py). `--gpu` lets tests see the
GPU, and leaves out those that are marked cpu. Files that are not meant for one are not run with it:
scripts/on_a_gpu has those that are.
"""

import gc
import logging
import os
import signal
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tools import extras, machines, rooms

# Two threads are hardly faster for models this small, and ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
# a thread that waits leaves the processor to others
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

# A job in the background ignores SIGINT, and so would each process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # what is imported stays: until the tests begin, there is no garbage to look for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests of the book, too")
    parser.addoption("--gpu", action="store_true", help="do not hide the GPU from the tests")
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, too")
    parser.addoption("--machine", choices=machines.MACHINES, help="simulate another machine")


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of pytest-xdist's."""
    return hasattr(config, "workerinput")


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--machine")
    if name is not None and not is_worker(config):  # a worker inherits it
        machines.simulate(name)
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Windows drops an empty one
    if not is_worker(config):  # a worker is told
        rooms.choose(config)
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadfile"  # what a module shares is made by one worker, and once
    if getattr(config.option, "numprocesses", None):
        return  # the workers run the tests
    import torch  # only now: it reads the variables of the machine

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: on the CPU


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With workers, these are children of this process."""
    terminalreporter.write_line(f"{processor_seconds():.0f} s of processor time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return rooms.is_left_out(collection_path, config) or None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return extras.File.from_parent(parent, path=module_path)  # skipped without its extra


def pytest_collection_finish() -> None:
    """Looking for garbage leaves out what was imported: half a second each time. It begins less often than usual, which
    was a tenth of the time of a simulation."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings complain at the end


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A traceback keeps its frames, and these an engine: the next test would find its memory."""
    report = yield
    logging.disable(logging.NOTSET)  # some tests silence the whole process
    logging.getLogger("nanovllm").setLevel(logging.NOTSET)
    if call.excinfo is not None and not item.config.getoption("usepdb"):
        forget_frames(call.excinfo.value)
    return report


def forget_frames(error: BaseException | None) -> None:
    """Empties the frames of the error, and of those that it comes from."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with suppress(RuntimeError):  # a frame that still runs
                frame.clear()
            # up to Python 3.12 a frame keeps a copy of its variables: reading it brings it up to date
            dict(frame.f_locals)
        error = error.__cause__ or error.__context__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if config.getoption("--gpu") and torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cpu") is not None:
                item.add_marker(pytest.mark.skip(reason="about a CPU, and this is a GPU"))
    if config.getoption("--slow") or "SOLUTION" in os.environ:
        return
    num_variants: Counter[tuple[str, int | None]] = Counter()
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is None:
            continue
        but_every = slow.kwargs.get("but_every")
        key = item.nodeid.partition("[")[0], but_every
        if but_every is None or num_variants[key] % but_every:
            item.add_marker(pytest.mark.skip(reason="slow: pytest --slow runs it"))
        num_variants[key] += 1
