"""What a prompt may be: chats with content in parts, and the forms in which vLLM writes a prompt.

Run: pytest tests/processing/test_inputs.py [-k parts]
"""

import pytest
from wrong_values import PARAMS, PROMPTS

from nanovllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", num_blocks=200)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def part(text: str) -> dict:
    return {"type": "text", "text": text}


def test_parts_of_text_are_joined_by_line_ends(llm):
    messages = [
        {"role": "user", "content": [part("what is"), part("12 + 30?")]},
        {"role": "assistant", "content": [part("42")]},
        {"role": "user", "content": "thanks"},
    ]
    before = [dict(message) for message in messages]
    plain = [*user("what is\n12 + 30?"), {"role": "assistant", "content": "42"}, *user("thanks")]
    for ask in (llm.chat, llm.generate):
        in_parts, in_one = (
            ask(m, greedy(max_tokens=3), use_tqdm=False)[0] for m in (messages, plain)
        )
        assert in_parts.prompt == in_one.prompt and "what is\n12 + 30?<|im_end|>" in in_one.prompt
        assert in_parts.outputs[0].token_ids == in_one.outputs[0].token_ids
    assert messages == before


def test_an_assistant_that_said_nothing(llm):
    """A message that only called tools has the content None."""
    messages = [*user("hello"), {"role": "assistant", "content": None}, *user("hello?")]
    (output,) = llm.chat(messages, greedy(max_tokens=1), use_tqdm=False)
    assert "None" not in output.prompt and "assistant\n<|im_end|>" in output.prompt


REFUSED = [({"prompt": prompt}, message) for prompt, message in PROMPTS]
REFUSED += [({"prompt": "a", "params": params}, message) for params, message in PARAMS]
REFUSED += [
    ({"prompt": "a", "request_id": 5}, "request_id=5 is not allowed: it must be a string, and"),
    ({"prompt": "a", "request_id": ""}, "request_id='' is not allowed: it must be a string, and"),
    ({"prompt": "a", "priority": "high"}, "priority='high' is not allowed: it must be an integer"),
]


@pytest.fixture(scope="module")
def small_llm():
    return LLM(device="cpu", max_num_seqs=12, max_model_len=64, block_size=4, num_blocks=110)


@pytest.mark.parametrize("arguments, message", REFUSED)
def test_a_wrong_request_is_refused(small_llm, arguments, message):
    with pytest.raises(ValueError) as error:
        small_llm.add_request(**arguments)
    assert str(error.value).startswith(message) and not small_llm.has_unfinished()


def test_vllms_forms_of_a_prompt(llm):
    ids = llm.tokenizer.encode("Once upon a time")
    plain = llm.generate(["Once upon a time", ids], greedy(max_tokens=3), use_tqdm=False)
    forms = [{"prompt": "Once upon a time"}, {"prompt_token_ids": ids}]
    for prompts, expected in ((forms, plain), (forms[0], plain[:1]), (forms[1], plain[1:])):
        outputs = llm.generate(prompts, greedy(max_tokens=3), use_tqdm=False)
        assert [o.prompt for o in outputs] == [o.prompt for o in expected]
        assert [o.prompt_token_ids for o in outputs] == [o.prompt_token_ids for o in expected]
        assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]


# --- what the chat template gets ---

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHOWS_ALL = (
    "{{ tools | tojson }} {{ enable_thinking }} {{ add_generation_prompt }}"
    "{% for message in messages %} {{ message['content'] }}{% endfor %}"
)


def test_options_of_the_template(llm):
    chat = [*user("say 12"), {"role": "assistant", "content": "12 is"}]
    params = greedy(max_tokens=3)
    usual = llm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    (output,) = llm.chat(chat, params, use_tqdm=False)
    assert output.prompt == usual
    (output,) = llm.chat(chat, params, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == usual.removesuffix("<|im_start|>assistant\n")
    (output,) = llm.chat(
        chat, params, False, add_generation_prompt=False, continue_final_message=True
    )
    assert output.prompt.endswith("<|im_start|>assistant\n12 is")
    options = {"chat_template": SHOWS_ALL, "chat_template_kwargs": {"enable_thinking": False}}
    (output,) = llm.chat(chat, params, use_tqdm=False, tools=TOOLS, **options)
    assert output.prompt.endswith(" False True say 12 12 is") and '"name": "add"' in output.prompt
    request_id = llm.add_request({"messages": chat, "tools": TOOLS, **options}, params)
    assert llm.requests[request_id].prompt == output.prompt
    assert llm.abort(request_id)
    llm.step()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"enable_thinking": False}, "Chat has no field 'enable_thinking'"),
        ({"tool": TOOLS}, "Chat has no field 'tool': did you mean 'tools'"),
        ({"tools": "add"}, "tools='add' is not allowed: it must be a list of dicts"),
        ({"tools": [1]}, r"tools=\[1\] is not allowed"),
        ({"continue_final_message": True}, "continue_final_message=True .* begun or continued"),
        ({"add_generation_prompt": 1}, "add_generation_prompt=1 .* True or False"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs={1: 2} .* names as keys"),
        ({"chat_template": 5}, "chat_template=5 .* it must be text"),
        ({"chat_template": "{{ nothing.at.all }}"}, "the tokenizer rejects it"),
    ],
)
def test_other_options_of_the_template_are_refused(llm, options, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(user("hello"), greedy(max_tokens=1), use_tqdm=False, **options)
    assert not llm.has_unfinished()
