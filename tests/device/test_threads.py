"""How many threads a step runs on: as many as there are processors that no other program needs, unless the caller has chosen.

Run: pytest tests/device/test_threads.py [-k leave]
"""

import math
import threading
import time
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.device import threads as cpu

pytestmark = pytest.mark.cpu
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def llm(monkeypatch):
    """An engine as on a machine with two processors, whatever this one has; `llm.seen` are the threads of its steps."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    llm = LLM(num_blocks=1000)
    llm.runner.threads.most = llm.runner.threads.limit = 2
    llm.seen, prepare = [], llm.runner.prepare

    def noted(schedule):
        llm.seen.append((schedule.num_tokens, torch.get_num_threads()))
        return prepare(schedule)

    monkeypatch.setattr(llm.runner, "prepare", noted)
    llm.runner.threads.num_others = 0.0
    llm.runner.threads.last_look = cpu.Look(math.inf, 0.0, 0.0)  # it never looks again
    yield llm
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "num_others, threads", [(0.0, 2), (0.2, 2), (-0.1, 2), (0.4, 1), (1.0, 1), (7.5, 1)]
)
def test_threads_leave_the_processors_that_others_need(llm, num_others, threads):
    llm.runner.threads.num_others = num_others
    llm.generate([list(range(40)), [5] * 10], SHORT, use_tqdm=False)
    assert llm.seen == [(50, threads), (2, threads), (2, threads)] and torch.get_num_threads() == 2
    assert [
        llm.runner.threads.wanted(8, 0) for llm.runner.threads.num_others in (0.1, 1.1, 2.4, 9)
    ] == [8, 7, 5, 1]


@pytest.mark.parametrize(
    "limit, most",
    [("100000 100000", 1), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 2)],
)
def test_a_container_has_its_share(limit, most, monkeypatch):
    monkeypatch.setattr(cpu.Path, "read_bytes", lambda path: limit.encode())
    monkeypatch.setattr(cpu, "own_cpus", lambda: {0, 1})
    assert cpu.Threads().most == most


def test_where_the_system_does_not_tell_small_steps_run_on_one(llm):
    llm.runner.threads.last_look = cpu.Look(0.0, 0.0, None)
    llm.generate([list(range(300)), [5] * 10], SHORT, use_tqdm=False)
    assert llm.seen == [(310, 2), (2, 1), (2, 1)] and torch.get_num_threads() == 2


def test_what_others_use_is_what_we_do_not(monkeypatch):
    """In half a second of two processors: 0.9 s were worked, 0.4 s of them by us."""
    seconds = {"perf_counter": 10.0, "process_time": 3.0, "busy": 500.0}
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(cpu.time, name, lambda name=name: seconds[name])
    monkeypatch.setattr(cpu, "busy_seconds", lambda: seconds["busy"])
    threads = cpu.Threads()

    def step_ends(**clocks) -> None:
        seconds.update(clocks)
        with threads.of_step(0):
            pass

    step_ends(perf_counter=10.1, process_time=3.1, busy=500.2)
    assert threads.wanted(8, 0) == 8 and threads.num_others == 0.0  # too early to tell
    step_ends(perf_counter=10.5, process_time=3.4, busy=500.9)
    assert threads.wanted(8, 0) == 7
    assert threads.num_others == pytest.approx(1.0)
    seconds.update(perf_counter=11.1, process_time=3.4, busy=502.1)  # a pause of ours
    assert threads.wanted(8, 0) == 7 and threads.num_others == pytest.approx(1.0)
    step_ends(perf_counter=11.4, process_time=3.7, busy=502.4)  # from here on, only we work
    assert threads.wanted(8, 0) == 8 and threads.num_others == pytest.approx(0.0)
    step_ends(perf_counter=13.4, process_time=5.7, busy=506.4)  # a long step beside another program
    assert threads.wanted(8, 0) == 7 and threads.num_others == pytest.approx(1.0)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not tell")
def test_the_system_counts_what_we_work():
    """Our own work is in both counts, however busy others are."""
    busy, own = cpu.busy_seconds(), time.process_time()
    while time.process_time() - own < 0.3:
        sum(range(10_000))
    assert cpu.busy_seconds() - busy > 0.25


def test_a_step_that_fails_gives_them_back(llm, monkeypatch):
    def failing(schedule):
        raise MemoryError

    monkeypatch.setattr(llm.runner, "prepare", failing)
    with pytest.raises(MemoryError):
        llm.generate([[1]], SHORT, use_tqdm=False)
    assert torch.get_num_threads() == 2


def test_what_an_interrupt_has_left_is_put_right(llm):
    torch.set_num_threads(1)  # a Ctrl-C came just before they were given back
    llm.generate([[1]], SHORT, use_tqdm=False)
    assert torch.get_num_threads() == 2


def test_a_thread_that_begins_in_a_reduced_step_gets_all_back(llm):
    """Its own number stays small: PyTorch has read it in the middle of that step."""
    llm.runner.threads.num_others = 1.0  # steps run on one thread
    seen = []

    def work() -> None:
        torch.ones(100_000).add_(1)
        begun.set()
        go_on.wait()
        llm.generate([[1]], SHORT, use_tqdm=False)
        seen.append(llm.seen[-1][1])

    thread, begun, go_on = threading.Thread(target=work), threading.Event(), threading.Event()

    with llm.runner.threads.of_step(0):
        thread.start()
        begun.wait()
    llm.runner.threads.num_others = 0.0
    go_on.set()
    thread.join()
    assert seen == [2]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_in_the_environment_is_kept(llm, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    assert not LLM(num_blocks=10).runner.threads.can_change
