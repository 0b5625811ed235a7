"""allowed_token_ids, bad_words and truncate_prompt_tokens: what is drawn, beside others, under preemption, with forms.

Run: pytest tests/decoding/test_masks.py
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.sequence import Request
from nanovllm.topics.decoding.masks import words_of
from tests.tools.extras import needs

PROMPT = "Once upon a time there"


@pytest.fixture(scope="module")
def llm():
    return LLM(num_blocks=60, block_size=8, dtype="float32")


def output(llm, prompt=PROMPT, **params):
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12, **params), use_tqdm=False)
    return answer.outputs[0]


def naive(allowed: set, bad: list[list[int]], token_ids: list[int], vocab_size: int) -> list[bool]:
    """Whether each token is allowed next."""
    found = []
    for i in range(vocab_size):
        text = [*token_ids, i]
        is_bad = any(text[-len(word) :] == word for word in bad)
        found.append(i in allowed and not is_bad)
    return found


ids = st.integers(0, 5)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ids, max_size=6),
    st.lists(st.lists(ids, min_size=1, max_size=4), max_size=4),
    st.sets(ids, min_size=1),
)
def test_bits_say_what_a_loop_says(token_ids, bad, allowed):
    params = SamplingParams(
        allowed_token_ids=[*allowed], bad_words=["".join(map(str, word)) for word in bad] or None
    )
    tokenizer = SimpleNamespace(encode=lambda text, **_: [int(char) for char in text.strip()])
    words = words_of(params, tokenizer, vocab_size=6)
    (seq,) = Request("", None, [1, 2], SamplingParams()).sequences
    seq.token_ids = [1, 2, *token_ids]
    bits = words.bits(seq)
    assert [bool(bits >> i & 1) for i in range(6)] == naive(allowed, bad, token_ids, 6)


@pytest.mark.parametrize("temperature", [0, 1])
def test_only_what_is_allowed_is_drawn(llm, temperature):
    found = output(
        llm, temperature=temperature, seed=1, allowed_token_ids=[300, 301, 302], logprobs=3
    )
    assert {*found.token_ids} <= {300, 301, 302} and len(found.token_ids) == 12
    assert all(row[token_id] > -1000 for token_id, row in zip(found.token_ids, found.logprobs))


def test_a_bad_word_is_not_written(llm):
    plain = output(llm, temperature=0).text
    for word in plain.split()[:6]:
        text = output(llm, temperature=0, bad_words=[word]).text
        assert word not in text.split() and text != plain
    word = " ".join(plain.split()[1:4])  # of several tokens
    text = output(llm, temperature=0, bad_words=[word]).text
    assert word not in text and text.split()[:2] == plain.split()[:2]


def test_where_nothing_is_left_the_answer_ends(llm):
    token = llm.get_tokenizer().decode([300])
    found = output(llm, temperature=0, allowed_token_ids=[300], bad_words=[token])
    assert found.finish_reason == "stop"


def test_a_form_and_a_list_hold_together(llm):
    needs("llguidance")
    encode = llm.get_tokenizer().encode
    found = output(
        llm, temperature=0, structured_outputs={"regex": "[0-9]{3}"}, allowed_token_ids=encode("7")
    )
    assert found.text == "777" and found.finish_reason == "stop"
    assert (
        output(llm, temperature=0, structured_outputs={"choice": ["7", "8"]}, bad_words=["7"]).text
        == "8"
    )


def test_a_prompt_is_cut_at_its_begin(llm):
    ids = llm.get_tokenizer().encode(PROMPT)
    expected = output(llm, ids[-3:], temperature=0).token_ids
    for prompt in (PROMPT, ids):
        assert output(llm, prompt, temperature=0, truncate_prompt_tokens=3).token_ids == expected
    whole = output(llm, PROMPT, temperature=0).token_ids
    for most in (-1, len(ids), 2**31):
        assert output(llm, PROMPT, temperature=0, truncate_prompt_tokens=most).token_ids == whole
    long = ids * 500
    (answer,) = llm.generate(
        [long], SamplingParams(max_tokens=1, truncate_prompt_tokens=40), use_tqdm=False
    )
    assert answer.prompt_token_ids == long[-40:] and answer.prompt is None
