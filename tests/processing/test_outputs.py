"""Outputs as users get them: whole texts, copies, what is new in each, and the names that users of vLLM know; and what
the statistics count.

Run: pytest tests/processing/test_outputs.py [-k pickled]
"""

import copy
import pickle

import pytest
from fake_engine import new_llm

from nanovllm import LLM, SamplingParams
from nanovllm.processing.states import Reader


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
    state = real_llm.states.unfinished[request_id]
    reader = Reader(state)
    deltas = {i: [] for i in range(3)}
    while True:
        is_last = state.output.finished
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


def test_statistics_of_samples_that_share_their_prompt():
    """Of 8 tokens in two blocks, with 3 samples of 6 tokens, then of one request that finds the first block."""
    llm = new_llm()
    llm.generate([[5] * 8], SamplingParams(n=3, max_tokens=6, ignore_eos=True), use_tqdm=False)
    expected = {"prompt_tokens": 8, "computed_tokens": 8 + 3 * 5, "output_tokens": 18, "steps": 6}
    expected |= {"kv_blocks_used": 0, "kv_blocks_used_peak": 2 + 3 * 2, "preemptions": 0}
    stats = llm.stats()
    assert {name: stats[name] for name in expected} == expected
    llm.add_request([5] * 7, SamplingParams(max_tokens=9))
    llm.step()
    stats = llm.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (1, 0)
    assert (stats["kv_blocks_used"], stats["kv_blocks_used_peak"]) == (2, 8)
    assert (stats["prompt_tokens"], stats["prefix_cache_hit_tokens"]) == (15, 4)
    assert stats["computed_tokens"] == 8 + 3 * 5 + 3
