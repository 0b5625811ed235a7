"""A step that fails ends at most the request that made it fail, and a Ctrl-C at any line loses
nothing.

The model is the fake one of fake_model.py, so that a token that depends on a wrong slot is a wrong
token.

Run: pytest tests/core/test_faults.py [-k culprit]
With a Ctrl-C at every line of the engine, not at some: NANOVLLM_EVERY_LINE=1 pytest tests/core/test_faults.py -k any_line
"""

import gc
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import engine_fuzz
import pytest
from fake_model import FakeRunner

import nanovllm
from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.checks.blocks import check_blocks
from nanovllm.checks.schedules import ScheduleChecks
from nanovllm.frontend.text import Text
from nanovllm.schedule import Item, Schedule, ScheduleError
from nanovllm.scheduler import Scheduler

PACKAGE = str(Path(nanovllm.__file__).parent)
VOCAB_SIZE = 1536


class Boom(Exception):
    pass


def new_llm(num_blocks=1000, num_host_blocks=0, **kwargs) -> LLM:
    mode = "swap" if num_host_blocks else "recompute"
    options = dict(block_size=4, max_num_batched_tokens=40, preemption_mode=mode) | kwargs
    runner = FakeRunner(options["block_size"], VOCAB_SIZE, num_blocks, num_host_blocks)
    llm = LLM(runner=runner, max_num_seqs=12, max_model_len=100, num_blocks=num_blocks, **options)
    # also our own scheduler
    llm.checks = ScheduleChecks(llm.scheduler, llm.limits, llm.replies.unfinished)
    return llm


def requests() -> dict:
    """By id: prompts with equal beginnings; greedy, samples, beams, stop strings,
    log-probabilities."""
    stem = list(range(300, 321))
    return {
        "plain": ([5] * 9, SamplingParams(temperature=0, max_tokens=12, seed=1)),
        "samples": (stem, SamplingParams(n=3, seed=2, max_tokens=14)),
        "shared": ([*stem, 7, 7], SamplingParams(seed=3, max_tokens=9)),
        "beams": ([*stem, 8], BeamSearchParams(beam_width=3, max_tokens=8)),
        "twin": (stem, SamplingParams(n=2, seed=4, max_tokens=10)),
        "long": (list(range(500, 570)), SamplingParams(seed=5, max_tokens=12)),
    }


def result(output) -> list:
    return [(o.token_ids, o.text, o.finish_reason, o.cumulative_logprob) for o in output.outputs]


@pytest.fixture(scope="module")
def expected() -> dict:
    """Each request alone, with all the memory there is. A stop string is taken out of the middle of
    a text."""
    asked = requests()
    (output,) = new_llm().generate(
        [list(range(90))[:40]], SamplingParams(seed=6, max_tokens=20), use_tqdm=False
    )
    text = output.outputs[0].text
    asked["stop"] = (
        list(range(90))[:40],
        SamplingParams(seed=6, max_tokens=20, stop=[text[len(text) // 2 :][:4]]),
    )
    answers = {}
    for name, (prompt, params) in asked.items():
        (output,) = new_llm().generate([prompt], params, use_tqdm=False)
        answers[name] = prompt, params, result(output)
    assert answers["stop"][2][0][2] == "stop" and len(answers["stop"][2][0][0]) < 20
    return answers


def run_all(llm, expected, outputs=None) -> dict:
    outputs = {} if outputs is None else outputs
    for name, (prompt, params, _) in expected.items():
        llm.add_request(prompt, params, name)
    return go_on(llm, outputs)


def go_on(llm, outputs, most_steps=5000) -> dict:
    for _ in range(most_steps):
        if not llm.has_unfinished():
            return outputs
        outputs |= {output.request_id: output for output in llm.step()}
    raise AssertionError("it does not end")


def check_clean(llm) -> None:
    """Nothing is left, once what was aborted has been settled."""
    while llm.has_unfinished():
        assert all(output.finished for output in llm.step())
        assert not llm.requests
    llm.step()
    assert not llm.recovery.is_changing and not llm.recovery.suspects
    assert not llm.recovery.submitted and not llm.recovery.unwanted
    assert not llm.scheduler.has_unfinished() and llm.block_manager.num_used_blocks == 0
    assert len(llm.block_manager.free_host_blocks) == llm.runner.num_host_blocks
    check_blocks(llm.block_manager, [])


def check_others(outputs, expected, culprit=None, error=Boom) -> None:
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        assert output.finished
        if name == culprit:
            assert isinstance(output.error, error)
            assert "error" in {o.finish_reason for o in output.outputs}
        else:
            assert output.error is None and result(output) == expected[name][2], name


SETTINGS = {
    "plenty": {},
    "scarce": dict(num_blocks=36),
    "swap": dict(num_blocks=36, num_host_blocks=200),
    "scarce, no cache": dict(num_blocks=36, enable_prefix_caching=False),
}


def inject(llm, monkeypatch, place: str, is_hit) -> None:
    """Raises Boom at this place whenever `is_hit` says so of the request there."""

    def failing(owner, name, request_of, after=False):
        real = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if not after and any(map(is_hit, request_of(*args))):
                raise Boom
            value = real(*args, **kwargs)
            if after and any(map(is_hit, request_of(*args))):
                raise Boom
            return value

        monkeypatch.setattr(owner, name, wrapper)

    def in_step(schedule, *_):
        return {seq.request for seq, _, _ in schedule.items}

    def sampled(schedule, *_):
        return {seq.request for seq in schedule.sampled}

    def of_seq(_, seq, *__):
        return [seq.request]

    if place == "runner":
        failing(llm.runner, "launch", in_step)
    elif place == "sampler":  # the step has been computed
        failing(llm.runner, "launch", sampled, after=True)
    elif place == "priority":
        failing(llm.scheduler, "priority", lambda request: [request])
    elif place == "plan":
        failing(llm.scheduler, "tokens_to_compute", lambda request, schedule: [request], after=True)
    elif place == "update":
        failing(llm.scheduler, "update", lambda schedule, *_: sampled(schedule), after=True)
    elif place == "take prefix":
        failing(BlockManager, "take_prefix", of_seq, after=True)
    elif place == "allocate":
        failing(BlockManager, "allocate", of_seq, after=True)
    elif place == "preempt":
        failing(llm.scheduler, "preempt", lambda request: [request], after=True)
    elif place == "detokeniser":
        owners = {
            id(text): reply.request
            for reply in llm.replies.unfinished.values()
            for text in reply.texts
        }
        failing(
            Text,
            "add",
            lambda text, _: [owners[id(text)]] if id(text) in owners else [],
            after=True,
        )


CULPRITS = ["plain", "samples", "beams", "long"]
PLACES = [
    "runner", "sampler", "priority", "plan", "update", "take prefix", "allocate", "detokeniser",
]  # fmt: skip
CASES = [
    (place, culprit, setting)
    for i, place in enumerate(PLACES)
    for j, culprit in enumerate(CULPRITS)
    for k, setting in enumerate(SETTINGS)
    if (i + j + k) % 2 == 0  # half of them: every pair of two is among them
    and (place, culprit) != ("detokeniser", "beams")  # beams have no text before they end
]


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("place, culprit, setting", CASES)
def test_only_the_culprit_ends(monkeypatch, expected, place, culprit, setting):
    """The fault comes whenever this request is in the step, at the beginning or when it has a few
    tokens."""
    for num_tokens in (0, 3):
        llm = new_llm(**SETTINGS[setting])
        for name, (prompt, params, _) in expected.items():
            llm.add_request(prompt, params, name)
        seen = Counter()

        def is_hit(request, num_tokens=num_tokens, seen=seen):
            is_it = (
                request.request_id == culprit
                and request.sequences[0].num_output_tokens >= num_tokens
            )
            seen["hit"] += is_it
            return is_it

        with monkeypatch.context() as patch:
            inject(llm, patch, place, is_hit)
            outputs = go_on(llm, {})
        assert seen["hit"] or place == "take prefix"
        check_others(outputs, expected, culprit if seen["hit"] else None)
        assert (llm.stats()["failed_steps"] > 0) == (seen["hit"] > 0 and place != "detokeniser")
        check_clean(llm)


@pytest.mark.slow(but_every=8)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", ["runner", "sampler", "plan", "update", "allocate", "preempt"])
def test_a_fault_that_does_not_come_again_ends_nobody(monkeypatch, expected, place, setting):
    for when in (1, 2, 5, 17, 40):
        llm, calls = new_llm(**SETTINGS[setting]), Counter()

        def is_hit(request, calls=calls, when=when):
            calls["all"] += 1
            return calls["all"] == when

        with monkeypatch.context() as patch:
            inject(llm, patch, place, is_hit)
            check_others(run_all(llm, expected), expected)
        check_clean(llm)


def test_two_that_fail_only_together(expected, monkeypatch):
    """Nobody is to blame: both get their tokens, one after the other."""
    llm = new_llm()
    real = llm.runner.launch

    def run(schedule):
        if {"plain", "samples"} <= {seq.request.request_id for seq, _, _ in schedule.items}:
            raise MemoryError
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", run)
    check_others(run_all(llm, expected), expected)
    assert llm.stats()["failed_steps"] > 5
    check_clean(llm)


def test_several_culprits_and_requests_that_come_meanwhile(expected, monkeypatch):
    llm, outputs = new_llm(), {}
    real, failed = llm.runner.launch, []

    def run(schedule):
        names = {seq.request.request_id for seq, _, _ in schedule.items}
        if names & {"samples", "beams"}:
            failed.append(names)
            raise Boom
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", run)
    todo = list(expected)
    while todo or llm.has_unfinished():
        if todo:
            name = todo.pop(0)
            llm.add_request(*expected[name][:2], name)
        outputs |= {output.request_id: output for output in llm.step()}
    assert {name for name, output in outputs.items() if output.error is not None} == {
        "samples",
        "beams",
    }
    for name in expected.keys() - {"samples", "beams"}:
        assert result(outputs[name]) == expected[name][2]
    assert failed[-1] in ({"samples"}, {"beams"})
    check_clean(llm)


def test_suspects_may_be_aborted(expected, monkeypatch):
    llm = new_llm()
    real = llm.runner.launch
    for name, (prompt, params, _) in expected.items():
        llm.add_request(prompt, params, name)

    def run(schedule):
        if "plain" in {seq.request.request_id for seq, _, _ in schedule.items}:
            raise Boom
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", run)
    llm.step()
    assert llm.recovery.suspects
    for name in ("plain", "beams", "shared"):
        assert llm.abort(name)
    outputs = go_on(llm, {})
    assert {outputs[name].outputs[0].finish_reason for name in ("plain", "beams", "shared")} == {
        "abort"
    }
    for name in ("samples", "twin", "long", "stop"):
        assert result(outputs[name]) == expected[name][2]
    check_clean(llm)


def test_generate_raises_the_error_once_the_others_are_done(expected, monkeypatch):
    llm = new_llm()
    prompts, params, answers = zip(*expected.values())
    done, update = [], Scheduler.finish

    def run(schedule, real=llm.runner.launch):
        if any(seq.request.prompt_token_ids[0] == 5 for seq, _, _ in schedule.items):
            raise Boom("the fifth")
        return real(schedule)

    def finish(scheduler, seq, reason):
        done.append(seq.request.request_id)
        update(scheduler, seq, reason)

    monkeypatch.setattr(llm.runner, "launch", run)
    monkeypatch.setattr(Scheduler, "finish", finish)
    with pytest.raises(Boom, match="the fifth"):
        llm.generate(list(prompts), list(params), use_tqdm=False)
    assert len(set(done)) == len(expected) - 2  # beams end in another way
    check_clean(llm)
    with pytest.raises(Boom):
        list(llm.stream([5], SamplingParams(max_tokens=3)))
    check_clean(llm)
    assert result(llm.generate([prompts[1]], params[1], use_tqdm=False)[0]) == answers[1]


def test_what_had_been_said_before_the_error_stays(expected, monkeypatch):
    llm = new_llm()
    prompt, params, answer = expected["plain"]
    llm.add_request(prompt, params, "plain")

    def run(schedule, real=llm.runner.launch):
        if schedule.items[0].seq.num_output_tokens == 4:
            raise Boom
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", run)
    output = go_on(llm, {})["plain"].outputs[0]
    assert output.token_ids == answer[0][0][:4]
    assert answer[0][1].startswith(output.text)
    assert output.text
    assert output.finish_reason == "error"


def test_the_output_of_a_beam_search_that_fails_at_its_end(expected, monkeypatch):
    """Its text is made at the end, by the tokenizer."""
    llm = new_llm()

    def failing(*args):
        raise Boom

    monkeypatch.setattr("nanovllm.frontend.replies.results_of", failing)
    check_others(run_all(llm, expected), expected, "beams")
    check_clean(llm)


# --- Ctrl-C ---


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


def loop(llm, expected, names) -> dict:
    """The loop of step() over these requests, however often it is interrupted."""
    outputs, todo = {}, list(names)

    def cell():
        while todo or llm.has_unfinished():
            if todo and todo[0] not in {*llm.requests, *llm.replies.unreported, *outputs}:
                llm.add_request(*expected[todo[0]][:2], todo[0])
            del todo[:1]
            for output in llm.step():
                outputs[output.request_id] = output

    insist(cell)
    return outputs


def use(llm, expected) -> None:
    """What a user does in a notebook, with every answer checked."""
    outputs = loop(llm, expected, ["samples", "plain", "beams", "stop"])
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


@pytest.mark.parametrize("setting", SETTINGS)
def test_ctrl_c_at_any_line(expected, setting, pytestconfig):
    num_lines = 20 if pytestconfig.getoption("--slow") else 5
    llm = new_llm(**SETTINGS[setting])
    with Interrupter() as counter:
        use(llm, expected)
    check_clean(llm)
    rng, every = random.Random(len(setting)), os.environ.get("NANOVLLM_EVERY_LINE")
    lines = range(counter.count) if every else sorted(rng.sample(range(counter.count), num_lines))
    places = set()
    for at in lines:  # each with an engine that the ones before have left
        with Interrupter(at) as interrupter:
            use(llm, expected)
        places.add(interrupter.place)
        check_clean(llm)
    assert len(places) > num_lines // 2  # a run after a recovery has not always as many lines


def test_ctrl_c_by_a_real_signal(expected):
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
            outputs = loop(llm, expected, ["samples", "twin", "stop", "long"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            check_clean(llm)
            for name, output in outputs.items():
                assert result(output) == expected[name][2], name
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert count["interrupts"] == most


@pytest.mark.slow
def test_random_lives():
    """Two thousand steps of them; engine_fuzz.py by itself does more."""
    counts = engine_fuzz.run(steps=2000, seed=7)
    assert counts["right"] > 100 and counts["faults"] > 10 and counts["interrupts"] > 10, counts


# --- schedulers that are half right ---


class Nothing(Scheduler):
    def schedule(self):
        return Schedule()


class NoSchedule(Scheduler):
    def schedule(self):
        super().schedule()


class Forgetful(Scheduler):
    def schedule(self):
        if self.waiting and not self.running:
            self.waiting.pop()
        return super().schedule()


class Twice(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        schedule.items += schedule.items[:1]
        return schedule


class OverBudget(Scheduler):
    def step_budget(self):
        return 10**6, 10**6


class NoBlocks(Scheduler):
    def schedule(self):
        schedule = Schedule()
        while self.waiting:
            request = self.waiting.pop(0)
            self.running.append(request)
            seq = request.sequences[0]
            schedule.add(Item(seq, 0, seq.num_missing_tokens))
        return schedule


class NotRunning(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        self.running.clear()
        return schedule


class TooManyTokens(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        last = schedule.items[-1]
        schedule.items[-1] = last._replace(num_tokens=last.num_tokens + 1)
        return schedule


class ForgetsMoves(Scheduler):
    """Plans in its own way, and leaves the copies where they are."""

    def schedule(self):
        schedule = Schedule(*self.step_budget())
        self.schedule_running(schedule)
        self.schedule_waiting(schedule)
        return schedule


class NoCopies(Scheduler):
    def commit(self, plan, schedule):
        if schedule.items or plan[0].num_tokens > 1:
            return super().commit(plan, schedule)
        for item in plan:
            schedule.add(item)


class HalfOfTheSamples(Scheduler):
    def commit(self, items, schedule):
        super().commit(
            [item for item in items if item.seq.index < 2 or not schedule.items], schedule
        )


class TakesAnItemOut(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        if schedule.items[-1].num_tokens == 1:
            del schedule.items[-1]
        return schedule


class FromTheWrongToken(Scheduler):
    def schedule(self):
        schedule = super().schedule()
        schedule.items[0] = schedule.items[0]._replace(start=1, num_tokens=1)
        return schedule


@pytest.mark.parametrize(
    "cls, message",
    [
        (
            Nothing,
            r"Nothing.schedule\(\): it planned nothing, but there are unfinished requests: \['0', '1'\]",
        ),
        (NoSchedule, r"NoSchedule.schedule\(\): it returned None, and not a Schedule"),
        (
            Forgetful,
            r"planned nothing, but there are unfinished requests: \['1'\]; neither waiting nor running: \['1'\]",
        ),
        (Twice, r"Twice.schedule\(\): Sequence\(0.0: .*\) is in the schedule twice"),
        (OverBudget, "the schedule has 80 tokens, but max_num_batched_tokens=40"),
        (NoBlocks, r"is to compute 40 tokens, but lacks blocks for them: allocate them first"),
        (
            NotRunning,
            "is in the schedule, but it has ended, or its request is not in scheduler.running",
        ),
        (TooManyTokens, "is to compute 41 tokens, but 40 are missing"),
        (
            ForgetsMoves,
            "blocks are to be moved, but the schedule lacks them: call take_moves last",
        ),
        (
            NoCopies,
            r"is to write into block \d+, which others read: allocate copies it first",
        ),
        (
            TakesAnItemOut,
            "the sampled sequences do not match the items: add items with commit only",
        ),
        (FromTheWrongToken, "is to compute tokens from 1 on, but that is not the next one"),
        (HalfOfTheSamples, "2 of 3 sequences of 1 would get a token: it must be all or none"),
    ],
)
def test_a_scheduler_that_is_half_right_is_told_so(cls, message):
    llm = new_llm(scheduler_cls=cls)
    n = 3 if cls in (ForgetsMoves, NoCopies, HalfOfTheSamples, TakesAnItemOut) else 1
    prompts = [[1] * (38 if n == 3 else 40), [2] * 40]
    with pytest.raises(ScheduleError, match=message):
        llm.generate(prompts, SamplingParams(n=n, max_tokens=5, seed=1), use_tqdm=False)
    check_clean(llm)
    llm.add_request([3])
    if cls in (Nothing, NoSchedule, Twice, NoBlocks, NotRunning):
        for _ in range(3):  # again and again, and it can be ended
            with pytest.raises(ScheduleError):
                llm.step()
    (request_id,) = llm.requests
    assert llm.abort(request_id)
    llm.step()
    check_clean(llm)


def test_a_hook_that_always_raises():
    class Typo(Scheduler):
        def priority(self, request):
            return request.arival

    llm = new_llm(scheduler_cls=Typo)
    with pytest.raises(AttributeError, match="'Request' object has no attribute 'arival'"):
        llm.generate([[1], [2], [3]], SamplingParams(max_tokens=3), use_tqdm=False)
    check_clean(llm)
