"""A Ctrl-C at any line of the engine, of a scheduler's hook or of a report, once or twice, loses no output, no token and
no block, and leaves nothing behind. Ranks are in parallel/test_parallel.py, a server in server/test_server_hostile.py.

Run: pytest tests/core/test_ctrl_c.py [-k signal]
At every line of the engine, not at some: NANOVLLM_EVERY_LINE=1 pytest tests/core/test_ctrl_c.py -k any_line
"""

import dis
import gc
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import engine_fuzz
import pytest
from fake_engine import (
    SETTINGS,
    answer,
    answered_requests,
    check_clean,
    go_on,
    hooked,
    new_llm,
    raise_at,
    result,
)
from fake_model import FakeRunner, expected_output
from scheduling import new_request, new_scheduler, step

import nanovllm
from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.frontend.replies import Reply
from nanovllm.frontend.streaming import Reader
from nanovllm.frontend.text import Text
from nanovllm.frontend.turns import Turns

PACKAGE = str(Path(nanovllm.__file__).parent)
needs_alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no setitimer")


# --- anywhere ---


class Interrupter:
    """Raises KeyboardInterrupt at the k-th line of the package that is run, or counts the lines."""

    def __init__(self, at=None):
        self.at, self.count, self.place = at, 0, None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            if self.count == self.at:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self.at = None
                raise KeyboardInterrupt
            self.count += 1
        return self.trace


def insist(action, check=lambda: None):
    """What a user does after a Ctrl-C: runs the cell again."""
    while True:
        try:
            return action()
        except KeyboardInterrupt:
            check()


def loop(llm, names) -> dict:
    """The loop of step() over these requests, however often it is interrupted."""
    outputs, todo = {}, list(names)

    def cell():
        while todo or llm.has_unfinished():
            if todo and todo[0] not in {*llm.requests, *llm.replies.unreported, *outputs}:
                llm.add_request(*answered_requests()[todo[0]][:2], todo[0])
            del todo[:1]
            for output in llm.step():
                outputs[output.request_id] = output

    insist(cell)
    return outputs


def use(llm) -> None:
    """What a user does in a notebook, with every answer checked."""
    expected = answered_requests()
    outputs = loop(llm, ["samples", "plain", "beams", "stop"])
    read = {name: insist(lambda output=output: result(output)) for name, output in outputs.items()}
    assert read == {name: expected[name][2] for name in outputs}
    names = ["twin", "shared", "samples"]
    prompts, params, answers = zip(*map(expected.get, names))

    def nothing_is_left():
        """At the latest after the next step."""
        insist(lambda: llm.step(report=False))
        assert not llm.requests

    outputs = insist(
        lambda: llm.generate(list(prompts), list(params), use_tqdm=False), nothing_is_left
    )
    assert insist(lambda: tuple(map(result, outputs))) == answers
    prompt, params, answer = expected["stop"]
    assert (
        "".join(insist(lambda: list(llm.stream(prompt, params)), nothing_is_left)) == answer[0][1]
    )
    insist(
        lambda: "to abort" in llm.requests or llm.add_request(*expected["plain"][:2], "to abort")
    )
    insist(llm.step)
    insist(lambda: llm.abort("to abort"))
    while insist(llm.has_unfinished):
        insist(llm.step)


@pytest.mark.slow(but_every=2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ctrl_c_at_any_line(setting, pytestconfig):
    num_lines = 10 if pytestconfig.getoption("--slow") else 5
    answered_requests()  # before lines are counted
    llm = new_llm(**SETTINGS[setting])
    with Interrupter() as counter:
        use(llm)
    check_clean(llm)
    rng, every = random.Random(len(setting)), os.environ.get("NANOVLLM_EVERY_LINE")
    lines = range(counter.count) if every else sorted(rng.sample(range(counter.count), num_lines))
    places = set()
    for at in lines:  # each with an engine that the ones before have left
        with Interrupter(at) as interrupter:
            use(llm)
        places.add(interrupter.place)
        check_clean(llm)
    # a run after a recovery has not always as many lines
    assert len(places - {None}) > num_lines // 2


@needs_alarms
def test_ctrl_c_by_a_real_signal():
    llm, rng, count = new_llm(**SETTINGS["swap"]), random.Random(0), Counter()

    def handler(_, frame):
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):  # not in the test itself
                count["interrupts"] += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, handler)
    gc.disable()  # what is raised in a callback of its own is printed and lost
    try:
        most = 5000 if os.environ.get("NANOVLLM_EVERY_LINE") else 100
        while count["interrupts"] < most and count["rounds"] < 20 * most:
            count["rounds"] += 1
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.005))
            outputs = loop(llm, ["samples", "twin", "stop", "long"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            check_clean(llm)
            for name, output in outputs.items():
                assert result(output) == answered_requests()[name][2], name
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert count["interrupts"] == most


@pytest.mark.slow
@needs_alarms
def test_random_lives():
    """Two thousand steps of them; engine_fuzz.py by itself does more."""
    counts = engine_fuzz.run(steps=2000, seed=7)
    assert counts["right"] > 100 and counts["faults"] > 10 and counts["interrupts"] > 10, counts


# --- in a step ---


@pytest.mark.parametrize("prompt, block_size, num_blocks, max_tokens", [(4, 4, 4, 4), (9, 3, 6, 3)])
def test_ctrl_c_when_only_some_samples_have_their_token(prompt, block_size, num_blocks, max_tokens):
    """The last token of the prompt is then computed by each of them, in a block of its own: more
    blocks than there are."""
    llm = new_llm(num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=12)
    params = SamplingParams(n=3, seed=1, max_tokens=max_tokens)
    expected = answer(list(range(prompt)), params)
    llm.add_request(list(range(prompt)), params, "a")
    raise_at(llm.scheduler, "reason_to_end", 2)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert result(go_on(llm, 100)["a"]) == expected


@pytest.mark.parametrize("lengths", [(1, 0, 0), (1, 1, 0), (3, 3, 2), (3, 2, 2)])
def test_only_some_samples_had_their_token(lengths):
    """An update was interrupted, and all of the tokens are right."""
    scheduler, runner = new_scheduler(num_blocks=40, tokens=64), FakeRunner(4, vocab_size=1)
    request = new_request(1, 8, max_tokens=6, n=3)
    scheduler.add(request)
    for seq, length in zip(request.sequences, lengths):
        seq.token_ids += expected_output(request, seq.index, 64, 1)[:length]
    request.rewind()
    scheduler.restart(BlockManager(40, 4))
    scheduler.enqueue(request)
    for _ in range(10):
        if scheduler.has_unfinished():
            step(scheduler, runner)
    assert not scheduler.has_unfinished()
    for seq in request.sequences:
        assert seq.output_token_ids == expected_output(request, seq.index, 64, 1)


def test_ctrl_c_between_a_log_probability_and_its_token():
    class Tokens(list):
        def append(self, token_id):
            seq.token_ids = list(self)
            raise KeyboardInterrupt

    params = SamplingParams(seed=1, max_tokens=5, logprobs=2)
    (expected,) = new_llm().generate([[5] * 9], params, use_tqdm=False)
    llm = new_llm()
    llm.add_request([5] * 9, params, "a")
    llm.step()
    (seq,) = llm.requests["a"].sequences
    seq.token_ids = Tokens(seq.token_ids)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    output = go_on(llm)["a"]
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert len(output.outputs[0].logprobs) == 5


@pytest.mark.parametrize("hook", ["update", "commit", "finish"])
def test_a_ctrl_c_on_the_way_into_a_step_changes_no_later_one(hook):
    """It left a suspended generator behind. When Python let go of it, in the middle of a later step, it began anew."""
    params, held = SamplingParams(n=2, max_tokens=8, seed=2), []

    def dropping(scheduler, *_):
        held.clear()

    llm = new_llm(scheduler_cls=hooked(hook, dropping))
    llm.add_request([7] * 6, params, "a")

    def trace(frame, event, arg):
        is_enter = frame.f_code.co_name == "__enter__" and "contextlib" in frame.f_code.co_filename
        if not is_enter:
            return None
        if event == "return":
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        llm.step()
    except KeyboardInterrupt as error:
        held.append(error)
    finally:
        sys.settrace(None)
    assert held
    output = go_on(llm)["a"]
    assert output.error is None and result(output) == answer([7] * 6, params)
    check_clean(llm)


def test_an_interrupted_ending_is_forgotten_by_the_output():
    """It was marked as finished, the request was not yet let go of, and then everything began anew:
    it can be read on."""
    llm, prompt, params = new_llm(), [5] * 9, SamplingParams(seed=5, max_tokens=8)
    llm.add_request(prompt, params, "a")
    (output,) = llm.step()
    reply = llm.replies.unfinished["a"]
    reply.fail(RuntimeError("half done"))
    llm.recovery.is_changing = True  # a Ctrl-C came
    llm.step()
    assert not output.finished and output.error is None
    assert output.outputs[0].token_ids == answer(prompt, params)[0][0][:2]
    assert result(go_on(llm)["a"]) == answer(prompt, params)


def test_a_second_ctrl_c_before_an_abort(monkeypatch):
    """An abort looks up the replies, then the recovery ends the request, then its reply is reported
    again: KeyError."""
    llm = new_llm()
    llm.add_request([5] * 9, SamplingParams(seed=5, max_tokens=1), "a")
    raise_at(llm.scheduler, "finish", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Reply, "restart", Reply.restart)
        raise_at(Reply, "restart", 1)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    llm.abort("a")
    assert go_on(llm)["a"].finished
    check_clean(llm)


# --- in a call, a stream, a report ---


@pytest.mark.parametrize(
    "owner, name", [("scheduler", "schedule"), ("runner", "launch"), ("scheduler", "update")]
)
def test_an_interrupted_generate_leaves_nothing_behind(owner, name):
    llm = new_llm()
    raise_at(getattr(llm, owner), name, 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=9), use_tqdm=False)
    assert llm.step() == [] and not llm.has_unfinished()
    check_clean(llm)


def test_a_ctrl_c_while_a_late_text_is_made(monkeypatch):
    """The call ends, and the next one works."""
    llm, add, is_armed = new_llm(), Text.add, [True]
    prompts = [[i + 1] * 5 for i in range(3)]
    params = [SamplingParams(seed=n, max_tokens=n, ignore_eos=True) for n in (4, 9, 15)]

    def interrupted(text, token_id):
        if is_armed and len(text.token_ids) == 3:
            is_armed.clear()
            raise KeyboardInterrupt
        return add(text, token_id)

    monkeypatch.setattr(Text, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, use_tqdm=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [result(output) for output in outputs] == list(map(answer, prompts, params))
    assert not llm.replies.late
    check_clean(llm)


def test_a_second_ctrl_c_while_a_call_is_left():
    """Nothing of the call stays behind, at the latest after the next step."""
    llm, prompt, params = new_llm(), [5] * 9, SamplingParams(seed=5, max_tokens=6)
    raise_at(llm.scheduler, "update", 3)
    raise_at(llm.inbox, "_abort", 2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt] * 3, params, use_tqdm=False)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    llm.add_request(prompt, params, "next")
    llm.step()
    assert list(llm.requests) == ["next"]
    outputs = go_on(llm)
    assert list(outputs) == ["next"] and result(outputs["next"]) == answer(prompt, params)
    check_clean(llm)


def test_a_stream_goes_on_after_an_interrupted_recovery(monkeypatch):
    """Its text is made anew; until then the stream has shown more than there is, and spins."""
    llm = new_llm()
    prompt, params = [5] * 9, SamplingParams(seed=5, max_tokens=30)
    expected = answer(prompt, params)
    stream = llm.stream(prompt, params)
    text = next(stream) + next(stream)
    raise_at(llm.scheduler, "update", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Reply, "update", Reply.update)
        raise_at(Reply, "update", 1)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    lines = 0

    def watch(frame, event, arg):
        nonlocal lines
        lines += frame.f_code.co_name == "stream"
        if lines > 20_000:
            raise TimeoutError("it spins")
        return watch

    sys.settrace(watch)
    try:
        text += "".join(stream)
    finally:
        sys.settrace(None)
    assert text == expected[0][1]


def test_a_ctrl_c_while_a_stream_is_read_changes_no_text():
    """The text had got the token, the output had not: it got its text twice."""
    prompt, params = [5] * 9, SamplingParams(seed=5, max_tokens=12)
    expected = answer(prompt, params)
    for at in range(200):
        llm = new_llm()
        reply = llm._submit(llm.inputs.request(prompt, params), is_reported=False)
        reader = Reader(reply)
        for _ in range(5):
            llm.step()
        with Interrupter(at) as interrupter, suppress(KeyboardInterrupt):
            reader.news()
        go_on(llm)
        reader.news()
        assert result(reply.output) == expected
        if interrupter.place is None:  # fewer lines are run
            break
    assert 30 < at < 199


def test_a_ctrl_c_at_any_instruction_of_a_report_loses_no_output():
    """A signal may come between two instructions, not only at the end of a line."""
    places = Counter()
    for at in range(200):
        llm = new_llm()
        names = [llm.add_request([5], SamplingParams(max_tokens=1)) for _ in range(3)]
        llm.step(report=False)
        count = 0

        def trace(frame, event, arg, at=at):
            nonlocal count
            if frame.f_code.co_name != "take":
                return None
            frame.f_trace_opcodes = True
            opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            # no signal comes between it and the caller
            if event == "opcode" and opcode != "RETURN_VALUE":
                count += 1
                if count == at:
                    places[frame.f_lasti] += 1
                    raise KeyboardInterrupt
            return trace

        got = []
        sys.settrace(trace)
        try:
            got = llm.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        got += llm.step()
        assert sorted(output.request_id for output in got) == names
        if count < at:
            break
    assert count < at and len(places) > 10


def test_a_ctrl_c_while_a_thread_waits_for_its_turn_leaves_nothing(monkeypatch):
    turns = Turns()

    class Interrupted:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(turns, "lock", Interrupted())
    with pytest.raises(KeyboardInterrupt), turns.take():
        pass
    assert not turns.waiting
