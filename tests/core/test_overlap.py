"""With overlap, a step is launched before the tokens of the last one are read.

The device is simulated: its clock goes on while the host does something else. Its tokens are those of fake_model.py, which
reads what the KV cache holds when the step is launched.

Run: pytest tests/core/test_overlap.py
"""

import random

import pytest
from fake_engine import (
    VOCAB_SIZE,
    Boom,
    add_all,
    check_clean,
    check_others,
    go_on,
    new_llm,
    result,
)
from fake_model import FakeRunner

from nanovllm import LLM, BeamSearchParams, SamplingParams
from nanovllm.block_manager import BlockManager
from nanovllm.scheduler import Scheduler

COMPUTE = 100  # the time that a step takes on the device ...
LAUNCH = 7  # ... and on the host


class Device(FakeRunner):
    """`time` is the host's, `free_at` when the device has done all that was launched. Counts the steps that were launched
    before the tokens of the step before them were read."""

    is_asynchronous = True

    def __init__(self, num_blocks: int):
        super().__init__(4, VOCAB_SIZE, num_blocks)
        self.time, self.free_at, self.num_launched = 0, 0, 0
        self.num_unread = self.num_overlapping = 0

    def launch(self, schedule):
        self.num_overlapping += self.num_unread > 0
        self.num_launched += 1
        self.num_unread += 1
        self.time += LAUNCH
        self.free_at = free_at = max(self.time, self.free_at) + COMPUTE
        collect = super().launch(schedule)

        def wait():
            self.num_unread -= 1
            self.time = max(self.time, free_at)
            return collect()

        return wait


def device_llm(num_blocks: int = 200, **options) -> LLM:
    return LLM(
        runner=Device(num_blocks), num_blocks=num_blocks, block_size=4, max_model_len=100, **options
    )


PROMPT = [3, 1, 4, 1, 5, 9]


def params(length: int, **options) -> SamplingParams:
    return SamplingParams(seed=length, max_tokens=length, ignore_eos=True, **options)


# --- what it gains ---


@pytest.mark.parametrize(
    ("overlap", "expected"), [(True, LAUNCH + 20 * COMPUTE), (False, 20 * (LAUNCH + COMPUTE))]
)
def test_the_device_does_not_wait_for_the_host(overlap, expected):
    llm = device_llm(overlap=overlap)
    llm.generate([PROMPT] * 5, [params(n) for n in (4, 9, 9, 15, 20)], use_tqdm=False)
    assert llm.runner.time == expected
    assert llm.runner.num_launched == 20  # none for a sequence that is known to end
    assert llm.stats()["wasted_tokens"] == 0


def test_it_is_the_default_where_the_device_computes_by_itself():
    assert device_llm().overlaps and not new_llm(overlap=None).overlaps
    assert device_llm(overlap=False).overlaps is False
    assert LLM(num_blocks=10, overlap=None).overlaps is False


# --- what it costs ---


def test_a_token_behind_the_last_one_is_wasted():
    """The sequence ends by its token, when the next step has been launched: one token is computed for nothing."""
    alone = device_llm().generate(PROMPT, params(20), use_tqdm=False)[0].outputs[0].token_ids
    stop = alone[6]
    llm = device_llm()
    (output,) = llm.generate(PROMPT, params(20, stop_token_ids=[stop]), use_tqdm=False)
    assert output.outputs[0].token_ids == alone[: alone.index(stop) + 1]
    stats = llm.stats()
    assert (stats["wasted_tokens"], stats["output_tokens"]) == (1, alone.index(stop) + 1)
    check_clean(llm)


# --- what needs the tokens of a step first ---


class Own(Scheduler):
    pass


class OwnBlocks(BlockManager):
    pass


GRAMMAR = {"regex": "[0-9]{1,9}"}
FIRST = {
    "beams": BeamSearchParams(beam_width=2, max_tokens=9),
    "penalty": params(9, repetition_penalty=1.2),
    "bias": params(9, logit_bias={5: 1.0}),
    "bad words": params(9, bad_words=["a"]),
    "grammar": SamplingParams(max_tokens=9, structured_outputs=GRAMMAR),
}
ALONE = {
    "draft tokens": dict(speculative_config={"num_speculative_tokens": 2}),
    "a user's scheduler": dict(scheduler_cls=Own),
    "a user's block manager": dict(block_manager_cls=OwnBlocks),
    "off": dict(overlap=False),
}
OVERLAPS = {
    "greedy": params(9, temperature=0),
    "drawn": params(9, top_k=5, top_p=0.9),
    "logprobs": params(9, logprobs=2),
    "stop": params(9, stop=["xyz"]),
    "samples": params(9, n=3),
}


@pytest.mark.parametrize("name", [*FIRST, *ALONE, *OVERLAPS])
def test_which_steps_overlap(name):
    llm = device_llm(**ALONE.get(name, {}))
    llm.generate(PROMPT, {**FIRST, **OVERLAPS}.get(name, params(9)), use_tqdm=False)
    assert llm.runner.num_launched >= (2 if name == "grammar" else 5)
    expected = llm.runner.num_launched - 1 if name in OVERLAPS else 0
    assert llm.runner.num_overlapping == expected
    assert llm.stats()["wasted_tokens"] == 0


def test_a_step_that_might_preempt_is_planned_with_the_tokens():
    """The second request needs a block when none is free, but then the first one has ended."""
    llm = device_llm(num_blocks=8, max_num_seqs=2)
    llm.generate([PROMPT, PROMPT[::-1]], [params(11), params(12)], use_tqdm=False)
    assert llm.stats()["preemptions"] == 0
    assert 0 < llm.runner.num_overlapping < llm.runner.num_launched - 1
    check_clean(llm)


# --- the same tokens ---


def mixture(seed: int) -> tuple[list, list]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, 1000) for _ in range(draw.randrange(1, 60))] for _ in range(16)]
    prompts[5:7] = [[*prompts[3], 7], [*prompts[3], 9, 8]]
    options = [
        {},
        {"temperature": 0},
        {"stop": ["the", " a"]},
        {"n": 3},
        {"logprobs": 2},
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 0, "ignore_eos": True},
    ]
    rare = [{"repetition_penalty": 1.1}, {"prompt_logprobs": 1}, {"n": 2, "logprobs": 0}]
    chosen = [draw.choice(options if seed % 2 else options + rare) for _ in prompts]
    return prompts, [
        SamplingParams(seed=i, max_tokens=4 + 3 * i % 29, **one) for i, one in enumerate(chosen)
    ]


def exact(output) -> list:
    """All but log-probabilities, which depend on the batch in their last digits: of these, which tokens they are of."""
    return [
        (
            each.token_ids,
            each.text,
            each.finish_reason,
            each.stop_reason,
            [*map(list, each.logprobs or [])],
        )
        for each in output.outputs
    ]


def logprobs(output) -> list[float]:
    entries = [entry for each in output.outputs for entry in each.logprobs or []]
    entries += [entry for entry in output.prompt_logprobs or [] if entry]
    return [value for entry in entries for value in entry.values()]


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_blocks=40, max_num_batched_tokens=64),
        dict(num_blocks=32, max_num_batched_tokens=48, preemption_mode="swap", swap_gib=0.05),
        dict(max_num_seqs=5, block_size=4, num_blocks=130),
        dict(attention_backend="torch", block_size=1, num_blocks=400),
    ],
)
def test_a_real_model_gives_the_same_answers(options, seed):
    answers = []
    for overlap in (True, False):
        llm = LLM(max_model_len=128, dtype="float32", overlap=overlap, **options)
        answers.append(llm.generate(*mixture(seed), use_tqdm=False))
        check_clean(llm)
    for one, other in zip(*answers):
        assert exact(one) == exact(other)
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


# --- faults ---


@pytest.mark.parametrize("where", ["launch", "read"])
@pytest.mark.parametrize("call", [1, 2, 3, 7, 12])
def test_a_step_that_fails_once_changes_no_answer(where, call):
    llm = new_llm(overlap=True)
    launch, calls = llm.runner.launch, []

    def fail():
        raise Boom

    def failing(schedule):
        calls.append(1)
        collect = launch(schedule)
        if len(calls) != call:
            return collect
        return fail() if where == "launch" else fail

    llm.runner.launch = failing
    add_all(llm)
    check_others(go_on(llm))
    assert llm.stats()["failed_steps"] == 1
    check_clean(llm)


# --- while a step is in flight ---


@pytest.mark.parametrize("is_settled", [False, True])
def test_what_was_in_flight_when_all_were_aborted_is_dropped(is_settled):
    llm = device_llm()
    for name in "ab":
        llm.add_request(PROMPT, params(30), name)
    llm.step()
    for name in "ab":
        llm.abort(name)
    if is_settled:
        llm.step()
        assert llm.recovery.in_flight is None
    llm.add_request(PROMPT, params(3), "c")
    expected = device_llm().generate(PROMPT, params(3), use_tqdm=False)[0]
    assert result(go_on(llm)["c"]) == result(expected)
    assert llm.stats()["wasted_tokens"] == 2
    check_clean(llm)
