"""A step that fails ends at most the request that made it fail, and all others get the tokens and texts that they get
alone.

What a Ctrl-C does is in test_ctrl_c.py.

Run: pytest tests/core/test_recovery.py [-k culprit]
"""

from collections import Counter

import pytest
import torch
from fake_engine import (
    SETTINGS,
    Boom,
    add_all,
    answer,
    answered_requests,
    check_clean,
    check_others,
    go_on,
    new_llm,
    result,
)

from nanovllm import SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.processing.states import Reader
from nanovllm.processing.text import Text
from nanovllm.schedule import Schedule
from nanovllm.scheduler import Scheduler

SHORT = SamplingParams(seed=5, max_tokens=6)


def test_a_gpu_that_fails_is_no_fault_of_a_request(monkeypatch):
    """After an illegal access, each call of CUDA fails. No request ends for it; the engine says it in each step."""
    llm = new_llm()
    add_all(llm)

    def fails(schedule):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(llm.runner, "launch", fails)
    for _ in range(3):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            llm.step()
    assert llm.stats()["failed_steps"] == 0 and llm.has_unfinished()


def requests_in(thing) -> set:
    """The requests of a plan, of a sequence, or the request itself."""
    if isinstance(thing, Schedule):
        return {seq.request for seq, _, _ in thing.items}
    return {getattr(thing, "request", thing)}


def sampled(schedule) -> set:
    return {seq.request for seq in schedule.sampled}


def inject(llm, monkeypatch, place: str, is_hit) -> None:
    """Raises Boom at this place whenever `is_hit` says so of the request there."""
    states = llm.states.unfinished.values()
    texts = [(text, state.request) for state in states for text in state.texts]

    def of_text(text):
        return {request for other, request in texts if other is text}

    # what fails, which argument tells the request, and whether the work is done before
    owner, name, i, requests_of, is_late = {
        "runner": (llm.runner, "launch", 0, requests_in, False),
        "sampler": (llm.runner, "launch", 0, sampled, True),  # the step has been computed
        "priority": (llm.scheduler, "priority", 0, requests_in, False),
        "plan": (llm.scheduler, "tokens_to_compute", 0, requests_in, True),
        "update": (llm.scheduler, "update", 0, sampled, True),
        "prefix": (BlockManager, "take_prefix", 1, requests_in, True),
        "allocate": (BlockManager, "allocate", 1, requests_in, True),
        "preempt": (llm.scheduler, "preempt", 0, requests_in, True),
        "detokeniser": (Text, "add", 0, of_text, True),
    }[place]
    real = getattr(owner, name)

    def failing(*args, **kwargs):
        value = real(*args, **kwargs) if is_late else None
        if any(map(is_hit, requests_of(args[i]))):
            raise Boom
        return value if is_late else real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


CULPRITS = ["plain", "samples", "beams", "long"]
PLACES = "runner sampler priority plan update prefix allocate detokeniser".split()
CASES = [
    (place, culprit, setting)
    for i, place in enumerate(PLACES)
    for j, culprit in enumerate(CULPRITS)
    for k, setting in enumerate(SETTINGS)
    if (i + j + k) % 3 == 0  # a third of them: every pair of two is among them
    and (place, culprit) != ("detokeniser", "beams")  # beams have no text before they end
]


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize("place, culprit, setting", CASES)
def test_only_the_culprit_ends(monkeypatch, place, culprit, setting):
    """The fault comes whenever this request is in the step, at the beginning or when it has a few
    tokens."""
    for num_tokens in (0, 3):
        llm = new_llm(**SETTINGS[setting])
        add_all(llm)
        seen = Counter()

        def is_hit(request, num_tokens=num_tokens, seen=seen):
            num_output_tokens = request.sequences[0].num_output_tokens
            is_it = request.request_id == culprit and num_output_tokens >= num_tokens
            seen["hit"] += is_it
            return is_it

        with monkeypatch.context() as patch:
            inject(llm, patch, place, is_hit)
            outputs = go_on(llm)
        assert seen["hit"] or place == "prefix"
        check_others(outputs, *[culprit] * (seen["hit"] > 0))
        assert (llm.stats()["failed_steps"] > 0) == (seen["hit"] > 0 and place != "detokeniser")
        check_clean(llm)


@pytest.mark.slow(but_every=17)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", ["runner", "sampler", "plan", "update", "allocate", "preempt"])
def test_a_fault_that_does_not_come_again_ends_no_request(monkeypatch, place, setting):
    for when in (1, 5, 40):
        llm, calls = new_llm(**SETTINGS[setting]), Counter()

        def is_hit(request, calls=calls, when=when):
            calls["all"] += 1
            return calls["all"] == when

        add_all(llm)
        with monkeypatch.context() as patch:
            inject(llm, patch, place, is_hit)
            check_others(go_on(llm))
        check_clean(llm)


# --- suspects ---


def test_two_that_fail_only_together():
    """Neither is to blame: both get their tokens, one after the other."""
    llm = new_llm()
    launch = llm.runner.launch

    def launch_or_fail(schedule):
        if {"plain", "samples"} <= {request.request_id for request in requests_in(schedule)}:
            raise Boom
        return launch(schedule)

    llm.runner.launch = launch_or_fail
    add_all(llm)
    check_others(go_on(llm))
    assert llm.stats()["failed_steps"] > 5
    check_clean(llm)


# --- what the caller gets ---


def test_generate_raises_the_error_once_the_others_are_done(monkeypatch):
    llm = new_llm()
    prompts, params, answers = zip(*answered_requests().values())
    done, finish = [], Scheduler.finish

    def launch(schedule, real=llm.runner.launch):
        if any(seq.request.prompt_token_ids[0] == 5 for seq, _, _ in schedule.items):
            raise Boom("the fifth")
        return real(schedule)

    def noted(scheduler, seq, reason):
        done.append(seq.request.request_id)
        finish(scheduler, seq, reason)

    monkeypatch.setattr(llm.runner, "launch", launch)
    monkeypatch.setattr(Scheduler, "finish", noted)
    with pytest.raises(Boom, match="the fifth"):
        llm.generate([*reversed(prompts)], [*reversed(params)], use_tqdm=False)
    assert len(set(done)) == len(prompts) - 2  # beams end in another way
    check_clean(llm)
    with pytest.raises(Boom):
        list(llm.stream([5], SamplingParams(max_tokens=3)))
    check_clean(llm)
    assert result(llm.generate([prompts[1]], params[1], use_tqdm=False)[0]) == answers[1]


def test_what_had_been_said_before_the_error_stays(monkeypatch):
    llm = new_llm()
    prompt, params, [(token_ids, text, _, _)] = answered_requests()["plain"]
    llm.add_request(prompt, params, "plain")

    def launch(schedule, real=llm.runner.launch):
        if schedule.items[0].seq.num_output_tokens == 4:
            raise Boom
        return real(schedule)

    monkeypatch.setattr(llm.runner, "launch", launch)
    output = go_on(llm)["plain"].outputs[0]
    assert output.token_ids == token_ids[:4]
    assert output.text and text.startswith(output.text)
    assert output.finish_reason == "error"


# --- texts that are made late, or when they are read ---


def test_a_tokenizer_that_fails_while_a_stream_is_read(monkeypatch):
    """The stream gets its error, nothing is left out of the text, and the request ends with the
    error."""
    llm, prompt = new_llm(), [5] * 9
    state = llm._submit(llm.inputs.request(prompt, SHORT), is_reported=False)
    llm.step()
    add = Text.add

    def failing(text, token_id):
        if text is state.texts[0]:
            raise RuntimeError("no such token")
        return add(text, token_id)

    monkeypatch.setattr(Text, "add", failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such token"):
            Reader(state).news()
    llm.add_request(prompt, SHORT, "innocent")
    outputs = go_on(llm)
    assert str(state.final_output().error) == "no such token"
    assert state.output.outputs[0].finish_reason == "error"
    assert result(outputs["innocent"]) == answer(prompt, SHORT)
    check_clean(llm)
