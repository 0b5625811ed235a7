"""While the device computes a step, the server makes the texts of the step before.

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

    def launch(self, schedule):
        self.time += LAUNCH
        self.free_at = max(self.time, self.free_at) + COMPUTE
        result = self.run(schedule)

        def collect():
            self.time = max(self.time, self.free_at)
            return result

        return collect


@pytest.fixture
def llm(monkeypatch):
    device = Device()
    add = Text.add

    def slow_add(text, token_id):
        device.time += TOKEN
        return add(text, token_id)

    monkeypatch.setattr(Text, "add", slow_add)
    return LLM(runner=device, num_blocks=200, block_size=4, max_model_len=100)


def params(**options) -> list[SamplingParams]:
    return [SamplingParams(seed=n, max_tokens=n, ignore_eos=True, **options) for n in LENGTHS]


def steps_alone() -> int:
    """The time of the steps, if the host did nothing but launch them."""
    return max(LENGTHS) * (LAUNCH + COMPUTE)


PROMPTS = [[i + 1] * 5 for i in range(len(LENGTHS))]


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
