"""What a class of students does to an engine: hooks that raise or add requests, threads, a fork. No other request is
harmed.

Ctrl-C is in test_ctrl_c.py, schedulers that plan nonsense are in test_foreign_schedulers.py.

Run: pytest tests/core/test_misuse.py [-k threads]
"""

import os
import sys
import threading
from functools import partial

import pytest
from fake_engine import answer, check_clean, go_on, hooked, in_threads, new_llm, result

from nanovllm import SamplingParams
from nanovllm.schedule import ScheduleError
from nanovllm.sequence import Request

HOOKS = ("add", "priority", "running_order", "next_waiting", "may_admit", "step_budget", "make_room", "reason_to_end",
         "finish", "update", "schedule", "commit", "admit", "tokens_to_compute")  # fmt: skip


# --- hooks that raise ---


@pytest.mark.parametrize("name", ["reason_to_end", "add", "priority", "commit"])
def test_a_hook_that_raises_for_one_request_ends_that_one(name):
    """Also one that the recovery itself calls, so that each attempt to recover raised, forever."""

    def hook(scheduler, thing, *_):
        request = thing if isinstance(thing, Request) else None
        if isinstance(thing, list):
            request = thing[0].seq.request
        (request or thing.request).params.extra_args["tenant"]

    llm = new_llm(scheduler_cls=hooked(name, hook))
    params = SamplingParams(max_tokens=3, seed=1, extra_args={"tenant": "a"})
    llm.add_request([5, 6], params, "good")
    llm.add_request([7, 8], SamplingParams(max_tokens=3, seed=1), "bad")
    outputs = go_on(llm)
    assert isinstance(outputs["bad"].error, KeyError)
    assert outputs["good"].error is None and len(outputs["good"].outputs[0].token_ids) == 3
    with pytest.raises(KeyError):
        llm.generate([7, 8], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


# --- hooks that call the engine ---


@pytest.mark.parametrize("name", HOOKS)
def test_a_request_that_a_hook_adds_waits_for_the_end_of_the_step(name):
    """It was taken for an interrupted step: the cache was thrown away under the step that ran."""
    prompt, params = [5] * 9, SamplingParams(n=2, max_tokens=8, seed=0)
    expected = answer(prompt, params)
    todo = [[9] * 5, [4] * 30]

    def hook(scheduler, *_):
        if todo and "asked" in llm.requests:
            llm.add_request(todo.pop(), SamplingParams(max_tokens=2, seed=9))

    llm = new_llm(scheduler_cls=hooked(name, hook))
    llm.add_request([8] * 5, SamplingParams(max_tokens=9, seed=2))
    llm.step()
    llm.add_request(prompt, params, "asked")
    outputs = go_on(llm)
    assert not todo and len(outputs) == 4
    assert result(outputs["asked"]) == expected
    assert all(output.error is None for output in outputs.values())
    assert llm.stats()["failed_steps"] == 0
    check_clean(llm)


@pytest.mark.parametrize("call", ["step", "generate", "stream"])
def test_a_hook_must_not_wait_for_a_step(call):
    def hook(scheduler, *_):
        if call == "step":
            llm.step()
        elif call == "generate":
            llm.generate([5], use_tqdm=False)
        else:
            next(llm.stream([5]))

    llm = new_llm(scheduler_cls=hooked("update", hook))
    message = r"LLM.step\(\): called within a step, by an observer or a method of Scheduler: there, only add_"
    with pytest.raises(ScheduleError, match=message):
        llm.generate([[5] * 9, [6] * 3], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


# --- threads ---


@pytest.fixture
def eager_threads():
    """They take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_take_turns(eager_threads):
    """Two that generate and one that streams, on one engine: nearly all answers were wrong, without a word."""
    prompts = [[i + 1] * (i % 7 + 2) for i in range(12)]
    params = SamplingParams(seed=3, max_tokens=12)
    expected = [answer(prompt, params) for prompt in prompts]
    llm, got = new_llm(), {}

    def generate(*part):
        for i in part:
            (output,) = llm.generate([prompts[i]], params, use_tqdm=False)
            got[i] = result(output)

    def stream(*part):
        for i in part:
            got[i] = "".join(llm.stream(prompts[i], params))

    in_threads(
        partial(generate, *range(4)),
        partial(generate, *range(4, 8)),
        partial(stream, *range(8, 12)),
    )
    for i in range(12):
        assert got[i] == (expected[i] if i < 8 else expected[i][0][1])
    assert llm.stats()["failed_steps"] == 0
    check_clean(llm)


def test_a_thread_in_line_is_served_soon():
    """A lock is not fair: a thread in a loop of steps was first each time, until the end."""
    llm, steps_of_others = new_llm(), []
    one = SamplingParams(max_tokens=90, seed=1, ignore_eos=True)
    began = threading.Event()
    llm.observers.append(lambda schedule, seconds: began.set())

    def long():
        for _ in range(30):
            llm.generate([[5] * 3], one, use_tqdm=False)

    def short():
        began.wait()
        for _ in range(5):
            before = llm.counts.steps
            llm.generate([[6] * 3], SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
            steps_of_others.append(llm.counts.steps - before)

    in_threads(long, short)
    assert max(steps_of_others) < 1000  # of 2,700
    check_clean(llm)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_an_engine_does_not_go_along_with_a_fork():
    """Another thread may hold its lock, and is not there any more: the child would wait forever."""
    llm = new_llm()
    with llm.turns.take():
        child = os.fork()
        if child == 0:
            try:
                llm.generate([[1]], use_tqdm=False)
                os._exit(1)
            except RuntimeError as error:
                os._exit(0 if "belongs to the process before a fork" in str(error) else 2)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate([[1]], use_tqdm=False)[0].finished
