"""What a class of students does to an engine: hooks that raise or add requests, threads, Ctrl-C while it reports, a
queue of thousands. Nobody else is harmed, and nothing grows with the queue.

Run: pytest tests/core/test_misuse.py [-k threads]
"""

import copy
import dis
import gc
import pickle
import sys
import threading
from collections import Counter

import pytest
from counting import counting
from fake_model import FakeRunner
from test_faults import VOCAB_SIZE, check_clean, go_on, new_llm, result

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.frontend.streaming import Reader
from nanovllm.schedule import ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

HOOKS = ("add", "priority", "running_order", "next_waiting", "may_admit", "step_budget", "make_room", "reason_to_end",
         "finish", "update", "schedule", "commit", "admit", "tokens_to_compute")  # fmt: skip


def hooked(name, hook) -> type[Scheduler]:
    """A scheduler that calls `hook(scheduler, *args)` before one of its methods."""

    def method(self, *args):
        hook(self, *args)
        return getattr(Scheduler, name)(self, *args)

    return type("Hooked", (Scheduler,), {name: method})


# --- hooks that raise ---


@pytest.mark.parametrize("name", ["reason_to_end", "add", "priority", "commit"])
def test_a_hook_that_raises_for_one_request_ends_that_one(name):
    """Also one that the recovery itself calls, so that each attempt to recover raised, for ever."""

    def hook(scheduler, thing, *_):
        request = thing if isinstance(thing, Request) else None
        if isinstance(thing, list):
            request = thing[0].seq.request
        (request or thing.request).params.extra_args["tenant"]

    llm = new_llm(scheduler_cls=hooked(name, hook))
    llm.add_request(
        [5, 6], SamplingParams(max_tokens=3, seed=1, extra_args={"tenant": "a"}), "good"
    )
    llm.add_request([7, 8], SamplingParams(max_tokens=3, seed=1), "bad")
    outputs = go_on(llm, {})
    assert isinstance(outputs["bad"].error, KeyError)
    assert outputs["good"].error is None and len(outputs["good"].outputs[0].token_ids) == 3
    with pytest.raises(KeyError):
        llm.generate([7, 8], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


def test_a_hook_that_raises_while_a_request_is_aborted():
    def hook(scheduler, seq, reason):
        if reason == "abort":
            raise KeyError("reason")

    llm = new_llm(scheduler_cls=hooked("finish", hook))
    for name in "ab":
        llm.add_request([5, 6], SamplingParams(max_tokens=9, seed=1), name)
    llm.step()
    assert llm.abort("a")
    outputs = go_on(llm, {})
    assert outputs["a"].outputs[0].finish_reason == "abort"
    assert outputs["b"].error is None and len(outputs["b"].outputs[0].token_ids) == 9
    check_clean(llm)


class Tenants(Scheduler):
    """Its keys are computed once, and may not be comparable."""

    priority_is_fixed = True
    is_broken = False

    def priority(self, request):
        if self.is_broken and request.request_id == "bad":
            raise KeyError("priority")
        return request.params.extra_args["tenant"]


@pytest.mark.parametrize("bad", [{}, {"tenant": None}])
def test_a_fixed_priority_that_raises_for_a_new_request_harms_no_other(bad):
    llm = new_llm(scheduler_cls=Tenants)
    llm.add_request([7, 8], SamplingParams(max_tokens=3, seed=1, extra_args={"tenant": 1}), "good")
    llm.step()
    llm.scheduler.max_num_seqs = 1
    params = SamplingParams(max_tokens=3, seed=1, extra_args={"tenant": 2})
    llm.add_request([7, 8], params, "waits")
    llm.add_request([7, 8], SamplingParams(max_tokens=3, extra_args=bad), "bad")
    assert len(llm.generate([5], params, use_tqdm=False)[0].outputs[0].token_ids) == 3
    outputs = go_on(llm, {})
    assert isinstance(outputs["bad"].error, KeyError | TypeError)
    assert outputs["good"].error is None and outputs["waits"].error is None
    check_clean(llm)


def test_a_fixed_priority_that_raises_after_a_fault():
    """The recovery queues everybody again: each attempt raised, and nobody could go on."""
    llm = new_llm(scheduler_cls=Tenants)
    for name in ("a", "bad", "c"):
        params = SamplingParams(max_tokens=6, seed=1, extra_args={"tenant": 1})
        llm.add_request([5] * 9, params, name)
    llm.step()
    llm.scheduler.is_broken = True
    llm.recovery.is_changing = True  # a Ctrl-C came
    outputs = go_on(llm, {})
    assert isinstance(outputs["bad"].error, KeyError)
    assert all(len(outputs[name].outputs[0].token_ids) == 6 for name in "ac")
    check_clean(llm)


def test_a_restart_that_raises():
    class Restarts(Scheduler):
        def restart(self, block_manager):
            raise RuntimeError("no")

    llm = new_llm(scheduler_cls=Restarts)
    llm.add_request([5] * 9, SamplingParams(max_tokens=6, seed=1), "a")
    llm.step()
    llm.recovery.is_changing = True  # a Ctrl-C came
    assert len(go_on(llm, {})["a"].outputs[0].token_ids) == 6
    check_clean(llm)


def test_a_search_is_not_ended_by_a_policy_that_it_does_not_ask():
    class Short(Scheduler):
        def reason_to_end(self, seq):
            return "length" if seq.num_output_tokens >= 3 else super().reason_to_end(seq)

    llm = new_llm(scheduler_cls=Short)
    params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    expected = result(llm.beam_search([[5] * 9], params, use_tqdm=False)[0])
    llm.add_request([5] * 9, params, "beams")
    for _ in range(5):
        llm.step()
    llm.recovery.is_changing = True  # a Ctrl-C came
    assert result(go_on(llm, {})["beams"]) == expected
    check_clean(llm)


def test_a_preempt_that_refuses_is_told_so():
    """The step looked for room for ever."""

    class Protects(Scheduler):
        def preempt(self, request):
            if request.request_id == "vip":
                return
            super().preempt(request)

    llm = new_llm(num_blocks=8, scheduler_cls=Protects)
    for name in ("a", "vip"):
        llm.add_request([5, len(name)] * 6, SamplingParams(max_tokens=18, seed=1), name)
    with pytest.raises(
        ScheduleError, match=r"Protects.preempt\(\): Request\(vip\) is still running"
    ):
        go_on(llm, {})
    llm.abort("vip")
    assert len(go_on(llm, {})["a"].outputs[0].token_ids) == 18
    check_clean(llm)


@pytest.mark.parametrize(
    "reason, message", [(False, "it returned False, and not a text or None"), (None, None)]
)
def test_a_reason_to_end_that_is_none(reason, message):
    """A forgotten return value: the sequence ends by its length all the same."""
    llm = new_llm(scheduler_cls=type("Odd", (Scheduler,), {"reason_to_end": lambda *_: reason}))
    if message is not None:
        with pytest.raises(ScheduleError, match=message):
            llm.generate([5], SamplingParams(max_tokens=3), use_tqdm=False)
    else:
        (output,) = llm.generate([5], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs
        assert (len(output.token_ids), output.finish_reason) == (3, "length")
    check_clean(llm)


# --- hooks that call the engine ---


@pytest.mark.parametrize("name", HOOKS)
def test_a_request_that_a_hook_adds_waits_for_the_end_of_the_step(name):
    """It was taken for an interrupted step: the cache was thrown away under the step that ran."""
    prompt, params = [5] * 9, SamplingParams(n=2, max_tokens=8, seed=0)
    expected = result(new_llm().generate(prompt, params, use_tqdm=False)[0])
    todo = [[9] * 5, [4] * 30]

    def hook(scheduler, *_):
        if todo and "asked" in llm.requests:
            llm.add_request(todo.pop(), SamplingParams(max_tokens=2, seed=9))

    llm = new_llm(scheduler_cls=hooked(name, hook))
    llm.add_request([8] * 5, SamplingParams(max_tokens=9, seed=2))
    llm.step()
    llm.add_request(prompt, params, "asked")
    outputs = go_on(llm, {})
    assert not todo and len(outputs) == 4
    assert result(outputs["asked"]) == expected
    assert all(output.error is None for output in outputs.values())
    assert llm.stats()["failed_steps"] == 0
    check_clean(llm)


def test_a_hook_that_aborts():
    def hook(scheduler, *_):
        if "victim" in llm.requests:
            llm.abort("victim")

    llm = new_llm(scheduler_cls=hooked("update", hook))
    llm.add_request([5] * 9, SamplingParams(max_tokens=8, seed=0), "victim")
    llm.add_request([5] * 9, SamplingParams(max_tokens=8, seed=0), "other")
    outputs = go_on(llm, {})
    assert outputs["victim"].outputs[0].finish_reason == "abort"
    assert len(outputs["other"].outputs[0].token_ids) == 8
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
    message = r"Hooked.a hook\(\): it waits for a step within a step: it may only add and abort"
    with pytest.raises(ScheduleError, match=message):
        llm.generate([[5] * 9, [6] * 3], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


# --- threads ---


def in_threads(*functions) -> None:
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


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
    expected = [result(new_llm().generate(p, params, use_tqdm=False)[0]) for p in prompts]
    llm, got = new_llm(), {}

    def generating(part):
        def work():
            for i in part:
                (output,) = llm.generate([prompts[i]], params, use_tqdm=False)
                got[i] = result(output)

        return work

    def streaming():
        for i in range(8, 12):
            got[i] = "".join(llm.stream(prompts[i], params))

    in_threads(generating(range(4)), generating(range(4, 8)), streaming)
    for i in range(8):
        assert got[i] == expected[i]
    for i in range(8, 12):
        assert got[i] == expected[i][0][1]
    assert llm.stats()["failed_steps"] == 0
    check_clean(llm)


def test_a_stream_that_another_thread_collects_in_the_middle_of_a_step():
    """An innocent request ended with an error: the abort looked at the other thread's stack, and saw no step."""
    llm = new_llm()
    stream = llm.stream([9] * 5, SamplingParams(seed=1, max_tokens=30))
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream
    llm.add_request([5] * 9, SamplingParams(seed=5, max_tokens=15), "innocent")
    run = llm.runner.launch

    def collecting(schedule):
        if cycle:
            cycle.clear()
            in_threads(gc.collect)
        return run(schedule)

    llm.runner.launch = collecting
    output = go_on(llm, {})["innocent"]
    assert output.error is None and len(output.outputs[0].token_ids) == 15
    assert llm.stats()["failed_steps"] == 0
    check_clean(llm)


def test_who_is_in_line_is_served_soon():
    """A lock is not fair: whoever is in a loop of steps was first each time, until the end."""
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


# --- Ctrl-C ---


@pytest.mark.parametrize("hook", ["update", "commit", "finish"])
def test_a_ctrl_c_on_the_way_into_a_step_changes_no_later_one(hook):
    """It left a suspended generator behind. When Python let go of it, in the middle of a later step, it began anew."""
    params = SamplingParams(n=2, max_tokens=8, seed=2)
    expected = result(new_llm().generate([7] * 6, params, use_tqdm=False)[0])
    held = []

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
    output = go_on(llm, {})["a"]
    assert output.error is None and result(output) == expected
    check_clean(llm)


def test_a_ctrl_c_while_a_stream_is_read_changes_no_text():
    """The text had got the token, the output had not: it got its text twice."""
    prompt, params = [5] * 9, SamplingParams(seed=5, max_tokens=12)
    expected = result(new_llm().generate(prompt, params, use_tqdm=False)[0])
    places = 0
    for at in range(200):
        llm = new_llm()
        reply = llm._submit(llm.inputs.request(prompt, params), is_reported=False)
        reader = Reader(reply)
        for _ in range(5):
            llm.step()
        lines = 0

        def trace(frame, event, arg, at=at):
            nonlocal lines
            if "nanovllm" not in frame.f_code.co_filename:
                return None
            lines += event == "line"
            if event == "line" and lines == at:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            reader.news()
        except KeyboardInterrupt:
            places += 1
        finally:
            sys.settrace(None)
        while not reply.output.finished:
            llm.step()
        reader.news()
        assert result(reply.output) == expected
        if lines < at:
            break
    assert lines < at and places > 30


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


# --- a step without a token ---


def test_many_steps_without_a_token_are_right_if_many_tokens_are_missing():
    """A group of samples that is computed again, four tokens per step, needs more steps than the context is long."""

    class BoundedPauses(Scheduler):
        def step_budget(self):
            return self.max_num_batched_tokens, 4

    llm = new_llm(num_blocks=400, scheduler_cls=BoundedPauses)
    params = SamplingParams(n=12, max_tokens=50, ignore_eos=True, seed=1)
    expected = [
        result(output) for output in llm.generate([[5] * 10, [6] * 10], params, use_tqdm=False)
    ]
    run, calls = llm.runner.launch, []

    def once(schedule):
        calls.append(1)
        if len(calls) == 50:
            raise RuntimeError("transient")
        return run(schedule)

    llm.runner.launch = once
    outputs = llm.generate([[5] * 10, [6] * 10], params, use_tqdm=False)
    assert [result(output) for output in outputs] == expected


def test_who_cancels_again_and_again_is_no_livelock():
    """What was computed for those who have left was counted, and what they held was not."""
    llm = new_llm(max_num_batched_tokens=2)
    for i in range(8):
        request_id = llm.add_request([i] * 90)
        for _ in range(40):
            llm.step()
        llm.abort(request_id)
    check_clean(llm)


def test_a_scheduler_that_never_gets_ahead_is_told_so():
    class PreemptsEverybody(Scheduler):
        def make_room(self, schedule):
            for request in [*self.running]:
                self.preempt(request)

    llm = new_llm(scheduler_cls=PreemptsEverybody, enable_prefix_caching=False)
    with pytest.raises(ScheduleError, match=r"\d+ steps without a new token"):
        llm.generate([[1] * 60, [2] * 60], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)


# --- outputs ---


@pytest.fixture(scope="module")
def real_llm():
    return LLM(num_blocks=50, max_model_len=64)


@pytest.mark.parametrize(
    "stop, text, reason", [([], "/Jos\ufffd", "length"), (["Jo"], "/", "stop")]
)
def test_a_text_that_ends_within_a_character_is_not_cut_short(
    real_llm, monkeypatch, stop, text, reason
):
    """The last token is "Jos" and half a character; its whole text was held back."""
    tokens = [14, 1001]  # "/" and "Jos\xc3"
    monkeypatch.setattr(
        real_llm.runner,
        "launch",
        lambda s: lambda: ([tokens[len(next(iter(s.sampled))) - 1]], None),
    )
    params = SamplingParams(max_tokens=2, temperature=0, stop=stop)
    (output,) = real_llm.generate([[5]], params, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason) == (text, reason)
    assert "".join(real_llm.stream([5], params)) == text


def test_an_output_that_has_not_finished_can_be_pickled_and_copied(real_llm):
    real_llm.add_request("Once upon a time", SamplingParams(max_tokens=4, temperature=0))
    (output,) = real_llm.step()
    copies = pickle.loads(pickle.dumps(output)), copy.copy(output), copy.deepcopy(output)
    first = [completion.text for completion in output.outputs]
    while real_llm.has_unfinished():
        real_llm.step()
    for other in copies[::2]:
        assert [completion.text for completion in other.outputs] == first and not other.finished
    assert (
        output.finished
        and output.outputs[0].text.startswith(first[0])
        and output.outputs[0].text != first[0]
    )


def test_the_names_that_users_of_vllm_know(real_llm):
    params = SamplingParams(max_tokens=3, temperature=0)
    (positional,) = real_llm.generate(["12 + 30 ="], params, use_tqdm=False)
    (named,) = real_llm.generate(["12 + 30 ="], sampling_params=params, use_tqdm=False)
    assert named.outputs == positional.outputs
    chat = [{"role": "user", "content": "what is 12 + 30?"}]
    assert real_llm.chat(chat, sampling_params=params, use_tqdm=False)[0].finished
    assert real_llm.get_tokenizer().decode(named.outputs[0].token_ids) == named.outputs[0].text


def test_news_are_what_is_new_in_each_output(real_llm):
    """Together they are the whole, for any n; text that a stop string may begin with is held back."""
    params = SamplingParams(n=3, max_tokens=12, seed=1, stop=["e ", "th"], logprobs=1)
    (expected,) = real_llm.generate("Once upon a", params, use_tqdm=False)
    request_id = real_llm.add_request("Once upon a", params)
    reply = real_llm.replies.unfinished[request_id]
    reader = Reader(reply)
    deltas = {i: [] for i in range(3)}
    while True:
        is_last = reply.output.finished
        for delta in reader.news():
            deltas[delta.index].append(delta)
        if is_last:
            break
        real_llm.step()
    for output in expected.outputs:
        news = deltas[output.index]
        assert "".join(delta.text for delta in news) == output.text
        assert [i for delta in news for i in delta.token_ids] == output.token_ids
        assert [row for delta in news for row in delta.logprobs] == output.logprobs
        assert news[-1].finish_reason == output.finish_reason


def test_observers_see_each_step(real_llm):
    seen = []
    real_llm.observers.append(lambda schedule, seconds: seen.append((schedule, seconds)))
    try:
        real_llm.generate(
            [[5] * 9, [6] * 3], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False
        )
    finally:
        real_llm.observers.clear()
    assert [[item[1:] for item in schedule.items] for schedule, _ in seen] == [
        [(0, 9), (0, 3)],
        [(9, 1), (3, 1)],
        [(10, 1), (4, 1)],
    ]
    assert all(len(schedule.sampled) == 2 and seconds > 0 for schedule, seconds in seen)
    assert [schedule.num_used_blocks for schedule, _ in seen] == [2, 2, 2]


# --- nothing grows with the queue ---


def with_queue(num_waiting, seats, cls=None) -> LLM:
    runner = FakeRunner(16, VOCAB_SIZE, num_blocks=60)
    llm = LLM(
        runner=runner, num_blocks=60, max_num_seqs=seats, max_model_len=400, scheduler_cls=cls
    )
    params = SamplingParams(max_tokens=200, seed=1)
    for i in range(num_waiting + 5):
        llm.add_request([i % 7 + 1] * 200, params, str(i))
    for _ in range(3):
        llm.step()
    assert len(llm.scheduler.waiting) >= num_waiting
    return llm


class ShortestFirst(Scheduler):
    priority_is_fixed = True

    def priority(self, request):
        return len(request.prompt_token_ids)


@pytest.mark.parametrize("cls", [None, ShortestFirst])
@pytest.mark.parametrize("seats", [2, 50])
def test_a_step_and_an_abort_cost_the_same_with_any_queue(seats, cls):
    """With free seats, all who wait were sorted in each step, and the policy asked for each of them."""
    costs = []
    for num_waiting in (10, 2000):
        llm = with_queue(num_waiting, seats, cls)
        step = counting(llm.step)
        llm.abort("7")
        costs.append((step, counting(llm.step)))
    (step, with_abort), (step_long, with_abort_long) = costs
    # a search in a sorted list
    assert step_long <= step + 10 and with_abort_long <= with_abort + 60


def test_a_recovery_is_linear_in_the_queue():
    costs = []
    for num_waiting in (200, 2000):
        llm = with_queue(num_waiting, 2)
        llm.recovery.is_changing = True  # a Ctrl-C came
        costs.append(counting(llm.recovery.settle))
    assert costs[1] < 10.5 * costs[0] and costs[1] < 16 * 2000


def test_a_policy_that_changes_is_asked_again_in_each_step():
    """A queue that is sorted once is only for priorities that stay."""
    asked = Counter()

    class Changing(Scheduler):
        def priority(self, request):
            asked[request.request_id] += 1
            return -request.arrival if asked["flip"] else request.arrival

    llm = new_llm(scheduler_cls=Changing)
    llm.scheduler.max_num_seqs = 1
    for name in "abc":
        llm.add_request([5] * 4, SamplingParams(max_tokens=2, seed=1), name)
    llm.step()
    asked["flip"] = 1
    llm.step()
    llm.step()
    assert [request.request_id for request in llm.scheduler.running] == ["c"]


def test_a_long_prompt_that_waits_is_looked_up_once():
    """Its blocks that are in the cache were hashed anew in each step."""

    class Findable(dict):
        num_lookups = 0

        def get(self, key):
            Findable.num_lookups += 1
            return super().get(key)

    runner = FakeRunner(4, VOCAB_SIZE, num_blocks=60)
    llm = LLM(runner=runner, num_blocks=60, block_size=4, max_model_len=240)
    long = list(range(160))
    llm.generate(long, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.block_manager.findable = Findable(llm.block_manager.findable)
    llm.add_request([9] * 150, SamplingParams(max_tokens=40, seed=1))
    for _ in range(5):
        llm.step()
    llm.add_request(long, SamplingParams(max_tokens=70, seed=1))
    lookups = []
    for _ in range(20):
        before = Findable.num_lookups
        llm.step()
        lookups.append(Findable.num_lookups - before)
    assert llm.scheduler.waiting and max(lookups[:2]) >= 20 and max(lookups[2:]) <= 4
