"""How many threads a step runs on: one for small ones, all for large ones, and what somebody has chosen in any case.

`python -m pytest tests/test_cpu.py`
"""

import os
import subprocess
import sys

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.cpu import default_thread_counts

SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture
def llm(monkeypatch):
    """An engine as on a machine with two processors, whatever this one has; `llm.seen` are the threads of its steps."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    llm = LLM(num_blocks=2000)
    llm.runner.threads.defaults = {2}
    llm.seen, run = [], llm.runner._run

    def noted(schedule):
        llm.seen.append((schedule.num_tokens, torch.get_num_threads()))
        return run(schedule)

    monkeypatch.setattr(llm.runner, "_run", noted)
    yield llm
    torch.set_num_threads(before)


def test_threads_follow_the_work(llm):
    llm.generate([list(range(400)), [5] * 10], SHORT, use_tqdm=False)
    assert llm.seen == [(410, 2), (2, 1), (2, 1)] and torch.get_num_threads() == 2
    llm.seen.clear()
    llm.generate([[i] for i in range(200)], SHORT, use_tqdm=False)
    assert llm.seen == [(200, 2)] * 3


def test_long_contexts_are_work_too(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([[i] * 1900 for i in range(10)], params, use_tqdm=False)
    assert {threads for num_tokens, threads in llm.seen if num_tokens == 10} == {2}


def test_a_step_that_fails_gives_them_back(llm, monkeypatch):
    def failing(schedule):
        raise MemoryError

    monkeypatch.setattr(llm.runner, "_run", failing)
    with pytest.raises(MemoryError):
        llm.generate([[1]], SHORT, use_tqdm=False)
    assert torch.get_num_threads() == 2


def test_what_an_interrupt_has_left_is_put_right(llm):
    llm.runner.threads.to_restore = 2
    torch.set_num_threads(1)  # a Ctrl-C came just before they were given back
    llm.generate([[1]], SHORT, use_tqdm=False)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("chosen", [1, 3])
def test_a_number_that_the_caller_sets_is_kept(llm, chosen):
    torch.set_num_threads(chosen)
    llm.generate([[1]], SHORT, use_tqdm=False)
    assert {threads for _, threads in llm.seen} == {chosen} and torch.get_num_threads() == chosen


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_in_the_environment_is_kept(llm, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    assert not LLM(num_blocks=10).runner.threads.can_change


def test_the_defaults_are_pytorchs():
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert int(found) in default_thread_counts()
