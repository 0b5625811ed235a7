"""While the device computes a step, the host makes the texts of requests that ended in the one before.

The device is made up: it has a clock of its own, which goes on while the host does something else.

Run: pytest tests/core/test_late_texts.py
"""

import asyncio

import pytest
from fake_model import FakeRunner

from nanovllm import LLM, SamplingParams
from nanovllm.processing.text import Text
from nanovllm.topics.server.async_llm import AsyncLLM

COMPUTE = 100  # the time that a step takes on the device ...
LAUNCH = 7  # ... and on the host
TOKEN = 3  # the time in which the host makes text of a token
LENGTHS = [4, 9, 9, 15, 20]


class Device(FakeRunner):
    """`time` is the host's, `free_at` when the device has done all that was launched."""

    def __init__(self):
        super().__init__(4, vocab_size=90, num_blocks=200)
        self.time, self.free_at = 0, 0
        self.log: list[tuple[str, int]] = []

    def pass_time(self, what: str, duration: int) -> None:
        self.log.append((what, self.time))
        self.time += duration

    def launch(self, schedule):
        self.pass_time("launch", LAUNCH)
        self.free_at = max(self.time, self.free_at) + COMPUTE
        result = self.run(schedule)

        def collect():
            self.pass_time("collect", max(0, self.free_at - self.time))
            return result

        return collect


@pytest.fixture
def llm(monkeypatch):
    device = Device()
    add = Text.add

    def slow_add(text, token_id):
        device.pass_time("text", TOKEN)
        return add(text, token_id)

    monkeypatch.setattr(Text, "add", slow_add)
    return LLM(runner=device, num_blocks=200, block_size=4, max_model_len=100)


def params(**options) -> list[SamplingParams]:
    return [SamplingParams(seed=n, max_tokens=n, ignore_eos=True, **options) for n in LENGTHS]


def results(outputs) -> list:
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.finished, o.error) for o in outputs]


def steps_alone() -> int:
    """The time of the steps, if the host did nothing but launch them."""
    return max(LENGTHS) * (LAUNCH + COMPUTE)


PROMPTS = [[i + 1] * 5 for i in range(len(LENGTHS))]


def test_the_texts_of_generate_cost_no_time_but_the_last(llm):
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == LENGTHS
    assert llm.runner.time == steps_alone() + max(LENGTHS) * TOKEN
    kinds = [what for what, _ in llm.runner.log]
    in_step = []  # how many tokens became text in each step, and behind the last one
    for what in kinds:
        if what == "launch":
            in_step.append(0)
        in_step[-1] += what == "text"
    assert in_step[4] == 4 and in_step[9] == 18 and in_step[15] == 15  # each in the step after
    assert sum(in_step) == sum(LENGTHS) and in_step[-1] == 20
    last_collect = len(kinds) - 1 - kinds[::-1].index("collect")
    assert kinds[last_collect + 1 :] == ["text"] * 20


def test_what_takes_longer_than_a_step_costs_the_rest(llm, monkeypatch):
    monkeypatch.setattr("test_late_texts.TOKEN", 3 * COMPUTE)
    llm.generate(PROMPTS, params(), use_tqdm=False)
    hidden = 3 * COMPUTE  # in three steps, since two end in the same one
    texts = sum(LENGTHS) * 3 * COMPUTE
    assert llm.runner.time == steps_alone() - hidden + texts


def test_what_is_reported_is_not_late(llm):
    """`step` returns what is complete: another thread may read it."""
    requests = [llm.add_request(*pair) for pair in zip(PROMPTS, params())]
    ended = {}
    while llm.has_unfinished():
        for output in llm.step():
            if output.finished:
                ended[output.request_id] = output
    assert not llm.states.late
    assert llm.runner.time == steps_alone() + sum(LENGTHS) * TOKEN
    again = LLM(runner=Device(), num_blocks=200, block_size=4, max_model_len=100)
    expected = again.generate(PROMPTS, params(), use_tqdm=False)
    assert results(ended[name] for name in requests) == results(expected)


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_server_makes_texts_while_the_device_computes(llm, is_asynchronous):
    """A device that is not waited for has computed nothing when the launch returns: then the news can wait, too."""
    llm.runner.is_asynchronous = is_asynchronous

    async def answers() -> list[list[int]]:
        engine = AsyncLLM(llm)
        requests = [llm.inputs.request(*pair) for pair in zip(PROMPTS, params())]
        token_ids = [[] for _ in LENGTHS]
        async for i, delta in engine.stream(requests):
            for part in delta.parts:
                token_ids[i] += part.token_ids
        engine.close()
        await engine.ended()
        return token_ids

    streamed = asyncio.run(answers())
    num_late = 1 if is_asynchronous else sum(LENGTHS)  # that of the last step is all that is left
    assert llm.runner.time == steps_alone() + num_late * TOKEN
    again = LLM(runner=Device(), num_blocks=200, block_size=4, max_model_len=100)
    outputs = again.generate(PROMPTS, params(), use_tqdm=False)
    assert streamed == [output.outputs[0].token_ids for output in outputs]


def test_a_stop_string_is_not_late(llm):
    """It decides whether the sequence is in the next step."""
    text = llm.generate(PROMPTS[-1], params()[-1], use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 :][:3]
    outputs = llm.generate(PROMPTS, params(stop=stop), use_tqdm=False)
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].text == text[: text.index(stop)]
