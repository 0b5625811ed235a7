"""After a Ctrl-C, the next call works, and no block is lost. Ranks are in parallel/test_parallel.py, a server in
server/test_hostile.py.

Run: pytest tests/core/test_ctrl_c.py
"""

import contextlib
import linecache
import os
import sys
from contextlib import suppress
from pathlib import Path

import engine_fuzz
import pytest
from fake_engine import SETTINGS, answered_requests, check_clean, new_llm, result

import nanovllm
from nanovllm import inbox

PACKAGE = str(Path(nanovllm.__file__).parent)
NUM_PLACES = 30


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line that is run of the package, or of these files; or counts the lines."""

    def __init__(self, at: int | None = None, files: tuple[str, ...] = (PACKAGE,)):
        self.at = at
        self.files = files
        self.count = 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # at the end of `with lock:` a tracer can raise, but no signal can come
        if event == "line" and line.strip() != "with self.turns.take():":
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
        return self.trace


def answers(llm) -> list:
    """Of requests of all kinds: samples, beams, a stop string, shared prefixes."""
    prompts, params, _ = zip(*answered_requests().values())
    return [*map(result, llm.generate(list(prompts), list(params), use_tqdm=False))]


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_after_a_ctrl_c_the_next_call_works(setting):
    right = [expected for _, _, expected in answered_requests().values()]
    llm = new_llm(**SETTINGS[setting])
    with Interrupter() as counter:
        assert answers(llm) == right
    places = range(1, counter.count, counter.count // (NUM_PLACES // len(SETTINGS)))
    for at in places:  # each with the engine that the ones before have left
        with suppress(KeyboardInterrupt), Interrupter(at):
            answers(llm)
        assert answers(llm) == right, at
        check_clean(llm)


@pytest.mark.parametrize("has_request", [False, True])
def test_a_ctrl_c_whose_exception_is_kept_leaves_the_lock_free(has_request):
    """A REPL keeps the last exception, and with it the frames of the step. Interrupted is the code around the lock."""
    files = (inbox.__file__, contextlib.__file__)

    def interrupted(at: int | None) -> tuple[int, BaseException | None]:
        llm = new_llm()
        if has_request:
            llm.add_request([1, 2, 3])
        kept = None
        try:
            with Interrupter(at, files) as counter:
                llm.step()
        except KeyboardInterrupt as error:
            kept = error
        assert not llm.turns.is_taken_here(), kept
        return counter.count, kept

    num_lines, _ = interrupted(None)
    for at in range(1, num_lines + 1):
        assert interrupted(at)[1] is not None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(engine_fuzz.signal, "setitimer"), reason="there is no setitimer")
def test_random_lives():
    """Two thousand steps of them, or STEPS."""
    counts = engine_fuzz.run(steps=int(os.environ.get("STEPS", 2000)), seed=7)
    assert counts["right"] > 100 and counts["faults"] > 10 and counts["interrupts"] > 10, counts
