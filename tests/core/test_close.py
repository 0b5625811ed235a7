"""LLM.close, and `with LLM() as llm`: what an engine holds is given back, although references to it are left.

Run: pytest tests/core/test_close.py --slow
"""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS = {"num_blocks": 64, "device": "cpu"}


def test_a_closed_engine_holds_no_memory():
    with LLM(**OPTIONS) as llm:
        llm.generate("17 + 25 =", GREEDY, use_tqdm=False)
        cache = weakref.ref(llm.runner.kv_cache.tensor)
        weights = weakref.ref(next(llm.runner.model.parameters()))
    gc.collect()
    assert cache() is None and weights() is None
    llm.close()  # again
    assert llm.stats()["kv_blocks_used"] == 0
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("17 + 25 =", GREEDY, use_tqdm=False)
    assert llm.step() == [] and not llm.has_unfinished()


def test_closing_aborts_what_is_unfinished():
    llm = LLM(**OPTIONS)
    names = [llm.add_request("Once upon a time", GREEDY) for _ in range(3)]
    llm.step()
    names.append(llm.add_request("17 + 25 =", GREEDY))  # still waits
    llm.close()
    outputs = llm.step()
    assert [output.request_id for output in outputs] == names
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    assert not llm.has_unfinished() and llm.block_manager.num_used_blocks == 0


def test_an_error_in_the_with_block_is_the_user_s():
    with pytest.raises(ZeroDivisionError), LLM(**OPTIONS) as llm:
        llm.add_request("Hello", GREEDY)
        1 / 0  # noqa: B018
    (output,) = llm.step()
    assert output.outputs[0].finish_reason == "abort" and not llm.has_unfinished()


def test_a_hook_cannot_close_the_engine_in_the_middle_of_a_step():
    llm = LLM(**OPTIONS)
    llm.observers.append(lambda *_: llm.close())
    with pytest.raises(RuntimeError, match=r"close\(\) was called within a step"):
        llm.generate("Hello", GREEDY, use_tqdm=False)
    llm.observers.clear()
    assert llm.generate("17 + 25 =", GREEDY, use_tqdm=False)[0].outputs[0].text == " 42"


def test_a_thread_that_generates_meanwhile_hears_of_it():
    """Its request is aborted, or refused."""
    llm = LLM(**OPTIONS)
    has_begun = threading.Event()
    llm.observers.append(lambda *_: has_begun.set())
    ends = []

    def generate():
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        try:
            while True:
                (output,) = llm.generate("Hello", params, use_tqdm=False)
                ends.append(output.outputs[0].finish_reason)
        except RuntimeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    assert has_begun.wait(60)
    llm.close()
    thread.join(60)
    assert ends[-2:] == ["abort", "this LLM is closed"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", pytest.param("numba", marks=pytest.mark.slow)])
def test_python_may_end_while_a_thread_generates(backend):
    """Without an abort of the process, and without waiting for the whole answer."""
    if backend == "numba":
        pytest.importorskip("numba")
    code = f"""
import threading, time
from nanovllm import LLM, SamplingParams
llm = LLM(attention_backend={backend!r}, num_blocks=2000)
params = SamplingParams(max_tokens=2000, ignore_eos=True)
threading.Thread(target=llm.generate, args=([[1] * 50] * 8, params, False), daemon=True).start()
while llm.stats()["output_tokens"] < 20:
    time.sleep(0.01)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
