"""Text in and out: chat, streams, stop strings, characters of several tokens. With the embedded model.

Run: pytest tests/processing/test_text.py [-k stop_string]
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models

from nanovllm import LLM, SamplingParams
from nanovllm.processing.outputs import CompletionOutput
from nanovllm.processing.text import Text


@pytest.fixture(scope="module")
def llm():
    return LLM()


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def greedy(**kwargs) -> SamplingParams:
    return SamplingParams(temperature=0, **kwargs)


def feed(llm, text: str, stop=(), min_tokens=0) -> tuple[list[str], str, bool]:
    """What a stream shows after each token of `text`, the whole text, and whether a stop string ended it."""
    output, shown, pieces, stopped = CompletionOutput(0), 0, [], False
    params = SamplingParams(stop=list(stop), min_tokens=min_tokens, max_tokens=99)
    stream = Text(llm.tokenizer.backend_tokenizer, output, params)
    for token_id in llm.tokenizer.encode(text):
        stopped = stream.add(token_id)
        pieces.append(output.text[shown : stream.num_safe_chars])
        shown = stream.num_safe_chars
        if stopped:
            break
    assert not stopped or stream.num_safe_chars == len(output.text)
    if not stopped:
        stream.end()
    pieces.append(output.text[shown : stream.num_safe_chars])
    return pieces, output.text, stopped


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "Jürgen, José, Zoë",
        "日本語のテキスト",
        "👩‍🚀🚀 a👍🏽b",
        "  two  spaces\n\n\ttab ",
        "e\u0301",
    ],
)
def test_no_half_character_is_ever_shown(llm, text):
    pieces, whole, stopped = feed(llm, text)
    assert whole == "".join(pieces) == text and not stopped
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_cut_off_by_the_end_is_not_shown(llm):
    ids = llm.tokenizer.encode("a👍")
    output = CompletionOutput(0)
    stream = Text(llm.tokenizer.backend_tokenizer, output, SamplingParams())
    for token_id in ids[:-1]:
        stream.add(token_id)
    assert len(ids) > 3 and output.text == "a"
    stream.end()
    assert output.text == llm.tokenizer.decode(ids[:-1]) == "a\ufffd"  # one for its three bytes


@pytest.mark.parametrize(
    "stop, expected",
    [
        (["437"], "12 + "),
        (["37", "437"], "12 + "),  # the earlier one in the text, not in the list
        (["+ 4"], "12 "),
        (["1"], ""),
        (["🙂"], "12 + 437 = 449"),
        (["449x"], "12 + 437 = 449"),
        (["= 449"], "12 + 437 "),
    ],
)
def test_stop_strings_across_token_borders(llm, stop, expected):
    pieces, whole, stopped = feed(llm, "12 + 437 = 449", stop)
    assert whole == "".join(pieces) == expected
    assert stopped == (expected != "12 + 437 = 449")


def test_of_a_stop_string_that_comes_twice_the_first_counts(llm):
    (twice,) = llm.tokenizer.encode(" little")
    assert llm.tokenizer.decode([twice]).count("t") == 2
    assert feed(llm, "a little", ["t"])[1] == "a li"


@pytest.mark.parametrize("min_tokens", [0, 99])
def test_what_may_become_a_stop_string_is_held_back(llm, min_tokens):
    pieces, _, _ = feed(llm, "ab ab abc", ["abcd"], min_tokens)
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert not shown.endswith(("a", "ab", "abc"))
    assert shown + pieces[-1] == "ab ab abc"


def test_a_stop_string_ends_the_request(llm):
    (whole,) = llm.chat(user("count from 1 to 9"), greedy(), use_tqdm=False)
    text = whole.outputs[0].text
    cut = text[3:6]
    (output,) = llm.chat(user("count from 1 to 9"), greedy(stop=[cut, "nowhere"]), use_tqdm=False)
    assert (
        output.outputs[0].text == text[: text.index(cut)]
        and output.outputs[0].finish_reason == "stop"
    )
    assert len(output.outputs[0].token_ids) < len(whole.outputs[0].token_ids)
    assert llm.stats()["kv_blocks_used"] == 0


def test_a_stop_string_completed_by_the_last_allowed_token(llm):
    (whole,) = llm.chat(user("count from 1 to 9"), greedy(max_tokens=4), use_tqdm=False)
    text = whole.outputs[0].text
    assert whole.outputs[0].finish_reason == "length"
    (output,) = llm.chat(
        user("count from 1 to 9"), greedy(max_tokens=4, stop=text[-1]), use_tqdm=False
    )
    assert output.outputs[0].finish_reason == "stop" and text[-1] not in output.outputs[0].text


def test_each_sample_ends_by_its_own_stop_string(llm, caplog):
    params = SamplingParams(n=4, seed=4, max_tokens=20)
    (whole,) = llm.chat(user("tell me a story"), params, use_tqdm=False)
    params = replace(params, stop=" a")
    (output,) = llm.chat(user("tell me a story"), params, use_tqdm=False)
    texts = [one.text for one in whole.outputs]
    assert [one.text for one in output.outputs] == [text.partition(" a")[0] for text in texts]
    reasons = ["stop" if " a" in text else "length" for text in texts]
    assert [one.finish_reason for one in output.outputs] == reasons
    assert len({text.find(" a") for text in texts}) > 1
    assert "a step failed" not in caplog.text  # the tokens would be right even so


@pytest.mark.parametrize("stop", [None, ["tt", " the end"]])
def test_stream_gives_what_generate_gives(llm, stop):
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=60, stop=stop)
    (whole,) = llm.chat(user("tell me a story"), params, use_tqdm=False)
    pieces = list(llm.stream(user("tell me a story"), params))
    assert "".join(pieces) == whole.outputs[0].text and len(pieces) > 10 and all(pieces)


def test_stream_refuses_before_it_is_iterated(llm):
    with pytest.raises(ValueError, match=r"n=2 is not allowed: only one answer is streamed"):
        llm.stream("x", SamplingParams(n=2))
    with pytest.raises(ValueError, match="prompt='' is empty"):
        llm.stream("")


@pytest.mark.parametrize(
    "messages",
    ["hello", ["hello"], [], [[]], {"role": "user"}, None, [{"rol": "user", "content": "hi"}]],
)
def test_messages_that_are_no_conversation(llm, messages):
    if messages == []:
        assert llm.chat(messages, use_tqdm=False) == []
    else:
        with pytest.raises(ValueError, match="it must be a list of"):
            llm.chat(messages, use_tqdm=False)


def test_default_params_are_the_models_own(llm):
    params = llm.inputs.default_params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert llm.inputs.eos_token_ids == {
        llm.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    }


def test_when_text_is_made(llm, monkeypatch):
    """For the caller of `generate` once, at the end; in what `step` returns, after each token."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    added = []
    add = Text.add
    monkeypatch.setattr(
        Text, "add", lambda self, token_id: added.append(token_id) or add(self, token_id)
    )
    num_added = []
    monkeypatch.setattr(llm, "observers", [lambda *_: num_added.append(len(added))])
    (expected,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
    assert num_added == [0] * 12 and added == expected.outputs[0].token_ids
    added.clear()
    llm.add_request("Once upon a time", params)
    texts = []
    while llm.has_unfinished():
        (output,) = llm.step()
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids[: len(texts) + 1]
        assert output.outputs[0].token_ids == added
        texts.append(output.outputs[0].text)
    assert texts[-1] == expected.outputs[0].text
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


# --- why it has stopped, and what of it is shown ---


def test_the_reason_to_stop(llm):
    """The stop string or stop token of the parameters; none for the model's own end, or a length."""
    chat = user("what is 12 + 30?")
    (plain,) = llm.chat(chat, greedy(max_tokens=60), use_tqdm=False)
    (answer,) = plain.outputs
    assert answer.finish_reason == "stop" and answer.stop_reason is None
    end = answer.token_ids[-1]
    third = answer.token_ids[2]
    assert third not in answer.token_ids[:2]

    def stopped(**options):
        (output,) = llm.chat(chat, greedy(**{"max_tokens": 60, **options}), use_tqdm=False)
        return output.outputs[0].finish_reason, output.outputs[0].stop_reason

    assert stopped(stop_token_ids=[third]) == ("stop", third)
    assert stopped(stop_token_ids=[end]) == ("stop", None)
    assert stopped(stop_token_ids=[end], ignore_eos=True) == ("stop", end)
    assert stopped(stop=["zzz", answer.text[-2:]]) == ("stop", answer.text[-2:])
    assert stopped(max_tokens=2) == ("length", None)


def test_what_ended_the_text_may_stay_in_it(llm):
    chat = user("what is 12 + 30?")
    (plain,) = llm.chat(chat, greedy(max_tokens=60), use_tqdm=False)
    text = plain.outputs[0].text
    special = llm.tokenizer.decode(plain.outputs[0].token_ids[-1:])
    assert special == "<|im_end|>"

    def shown(**options):
        (output,) = llm.chat(chat, greedy(max_tokens=60, **options), use_tqdm=False)
        return output.outputs[0].text

    assert shown(stop=text[2:4]) == text[:2]
    assert shown(stop=text[2:4], include_stop_str_in_output=True) == text[:4]
    assert shown(skip_special_tokens=False) == text
    assert shown(skip_special_tokens=False, include_stop_str_in_output=True) == text + special
    assert shown(include_stop_str_in_output=True) == text
    past = shown(ignore_eos=True, skip_special_tokens=False)
    assert past.startswith(text + special) and special not in shown(ignore_eos=True)
    stream = llm.stream(
        chat_text(llm, chat), greedy(max_tokens=60, stop=text[2:4], include_stop_str_in_output=True)
    )
    assert "".join(stream) == text[:4]


def chat_text(llm, messages) -> str:
    return llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.slow(but_every=4)
@pytest.mark.parametrize("min_tokens", range(1, 8))
def test_no_stop_string_ends_within_the_first_tokens(llm, min_tokens):
    """Also not one that began there and is shorter than another."""
    (plain,) = llm.generate("12 + 437 =", greedy(max_tokens=24, ignore_eos=True), use_tqdm=False)
    ids = plain.outputs[0].token_ids
    for stops in (["4", "49"], ["449"], ["9", "zzzzzzzzz"], [" "], ["="]):
        params = greedy(max_tokens=24, min_tokens=min_tokens, stop=stops, ignore_eos=True)
        (output,) = llm.generate("12 + 437 =", params, use_tqdm=False)
        assert output.outputs[0].text == cut_at(llm.tokenizer, ids, stops, min_tokens)


def cut_at(tokenizer, ids: list[int], stops: list[str], min_tokens: int) -> str:
    """The text of the tokens, cut off before a stop string that ends in a later token than the first ones."""
    before = ""
    for i in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:i], skip_special_tokens=True)
        found = [text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in stops]
        if i > min_tokens and max(found) >= 0:
            return text[: min(place for place in found if place >= 0)]
        before = text
    return before


# --- other tokenizers ---


def tokenizer_of(model, decoder, pieces: str, special: str) -> Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate([special, *pieces.split()])}
    tokenizer = Tokenizer(model(vocabulary))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([special])
    return tokenizer


BYTES = " ".join(f"<0x{byte:02X}>" for byte in "é☃ a\n".encode())
TOKENIZERS = {
    "byte fallback": tokenizer_of(
        lambda vocabulary: models.BPE(vocabulary, [], unk_token="<s>", byte_fallback=True),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        f"▁ ▁a ▁the b é ☃ {BYTES}", "<s>",
    ),
    "metaspace": tokenizer_of(lambda vocabulary: models.BPE(vocabulary, [], unk_token="<s>"), decoders.Metaspace(), "▁ ▁a ▁the b é ▁é .", "<s>"),
    "word pieces": tokenizer_of(lambda vocabulary: models.WordPiece(vocabulary, unk_token="[S]"), decoders.WordPiece(), "a the ##b ##é . , ' n't not do ##ing ?", "[S]"),
    "bytes": tokenizer_of(lambda vocabulary: models.BPE(vocabulary, []), decoders.ByteLevel(), "a Ġthe â ĺ ĥ Ċ âĺ ĥa Ġ Ã ©", "<s>"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_are_the_text_of_any_tokenizer(name):
    """Of bytes that are no text, `decode` takes back what was shown. Then nothing is raised."""
    tokenizer = TOKENIZERS[name]
    rng = random.Random(name)
    num_texts = 0
    for _ in range(1000):
        token_ids = rng.choices(range(tokenizer.get_vocab_size()), k=rng.randrange(1, 40))
        for skip in (True, False):
            text = Text(tokenizer, CompletionOutput(0), SamplingParams(skip_special_tokens=skip))
            for token_id in token_ids:
                text.add(token_id)
            text.end()
            whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
            num_texts += "\ufffd" not in whole
            assert text.output.text == whole or "\ufffd" in whole, token_ids
    assert num_texts > 30
