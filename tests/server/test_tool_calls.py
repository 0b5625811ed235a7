"""Tool calls in the form of the chat template: read whole and in pieces, forced by a grammar, sent back.

Run: pytest tests/server/test_tool_calls.py
"""

import json
import logging
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_tools import CHATS, Running, new_parrot

from nanovllm import LLM
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.loader import load_tokenizer
from nanovllm.processing.messages import Chat
from nanovllm.topics.server.parsing import Parser, Parts
from nanovllm.topics.server.tool_forms import form_of
from tests.tools.extras import needs

# what templates of these models write for a message with calls
ID = "{% if c.id|length != 9 %}{{ raise_exception('nine letters and digits') }}{% endif %}"
ONE = "{% if m.tool_calls|length != 1 %}{{ raise_exception('one call') }}{% endif %}"
XML = "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v|tojson if v is mapping or (v is sequence and v is not string) else v|string }}\n</parameter>\n{% endfor %}</function>\n"
TEMPLATES = {
    "Qwen3.5": f"<think>\n\n</think>\n\nEACH\n<tool_call>\n{XML}</tool_call>END",
    "Qwen3": 'EACH\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}\n</tool_call>END',
    "Hermes": 'EACH\n<tool_call>\n{ "arguments": {{ c.function.arguments|tojson }}, "name": "{{ c.function.name }}"}\n</tool_call> END',
    "SmolLM2": "<tool_call>[EACH{{ c.function|tojson }}{{ ', ' if not loop.last }}END]</tool_call>",
    "Mistral v3": f"[TOOL_CALLS] [EACH{ID}{{{{ (c.function|tojson)[:-1] }}}}, \"id\": \"{{{{ c.id }}}}\"}}{{{{ ', ' if not loop.last }}}}END]",
    "Mistral v11": "EACH[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments|tojson }}END",
    "Mistral v13": "EACH[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments|tojson }}END",
    "Llama": f'EACH{ONE}{{"name": "{{{{ c.function.name }}}}", "parameters": {{{{ c.function.arguments|tojson }}}}}}END',
}  # fmt: skip
UNKNOWN = ("", "{{ raise_exception('no') }}", "call {{ m.tool_calls }}", "<|tool_call|>[EACH{{ c.function|tojson }}END]", "EACHcall <sep>{{ c.function.name }}\n{{ c.function.arguments|tojson }}END")  # fmt: skip


def template(call: str) -> str:
    """Its first lines explain tools in another form, as templates do."""
    call = call.replace("EACH", "{% for c in m.tool_calls %}").replace("END", "{% endfor %}")
    tools = "{% if tools %}<|im_start|>system\n<tool_call>{..}</tool_call> {{ tools|tojson }}<|im_end|>\n{% endif %}"
    calls = f"{{% if m.tool_calls %}}{call}{{% endif %}}"
    message = f"<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{calls}<|im_end|>\n"
    opening = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return f"{tools}{{% for m in messages %}}{message}{{% endfor %}}{opening}"


@cache
def tokenizer_of(model: str):
    tokenizer = load_tokenizer(Path(EMBEDDED_MODEL))
    tokenizer.chat_template = template(TEMPLATES.get(model, model))
    return tokenizer


def test_the_template_says_which_form_the_model_knows(caplog):
    caplog.set_level(logging.INFO)
    for model in [*TEMPLATES, *UNKNOWN]:
        caplog.clear()
        form = form_of(tokenizer_of(model))
        form.log(logging.getLogger("test"))
        ((_, level, text),) = caplog.record_tuples
        assert form.is_known == (level == logging.INFO) == (model in TEMPLATES), (model, form)
        assert model in UNKNOWN or ascii(form.begin)[1:-1] in text


# --- texts ---

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
        "note": {"type": ["string", "null"], "maxLength": 8},
        "count": {"type": "integer", "minimum": 1, "maximum": 3},
        "size": {"enum": [1.5, 2, None, "big"]},
        "is_on": {"type": "boolean"},
        "items": {"type": ["array", "null"], "items": {"type": "boolean"}, "maxItems": 1},
        "more": {"$ref": "#/$defs/more"},
        "kind": {"anyOf": [{"enum": ["kg", 'a "b"']}, {"type": "null"}]},
    },
    "required": ["text", "note", "count", "items", "more", "kind"],
    "additionalProperties": False,
    "$defs": {"more": {"type": "object", "additionalProperties": False}},
}
FUNCTIONS = {"f": SCHEMA, "get-all_2": {"type": "object"}}
WORDS = ('say "hi"', '5" pipe', "</tool_call>", "</function>", "}{", "[/]", "\\", "\\n", "é☃\U0001f600", "a\nb\n", "3", "true", " ", "")  # fmt: skip
VALUES = {"count": (0, -7, 10**20), "size": (2.5, 3, None), "is_on": (True, False), "items": ([], [1, "a", None, {"b": '"'}]), "more": ({}, {"x": {"y": [True]}}), "kind": ("kg", None)}  # fmt: skip


def new_call(rng: random.Random) -> tuple[str, dict]:
    if rng.random() < 0.2:
        return "get-all_2", {}
    values = {key: rng.choice(VALUES[key]) for key in rng.sample([*VALUES], rng.randint(0, 3))}
    return "f", {"text": "".join(rng.choices(WORDS, k=3)), **values}


def written(model: str, calls) -> str:
    """As the template writes them."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    wrapped = [{"id": "abcdefghi", "type": "function", "function": one} for one in functions]
    chats = [[call] for call in wrapped] if model == "Llama" else [wrapped]
    texts = []
    for some in chats:
        messages = [{"role": "assistant", "tool_calls": some}]
        text = Chat(messages=messages, add_generation_prompt=False).text(tokenizer_of(model))
        text = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
        texts.append(text.removeprefix("<think>\n\n</think>\n\n").strip())
    return "; ".join(texts)


def new_parser(model: str) -> Parser:
    return Parser(None, True, None, FUNCTIONS, form_of(tokenizer_of(model)).is_bare)


def parsed(text: str, cuts: list[int], model: str) -> Parts:
    parser = new_parser(model)
    parts = Parts()
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        new = parser.add(text[begin:end], is_last=end == len(text))
        parts.reasoning += new.reasoning
        parts.content += new.content
        parts.tool_calls += new.tool_calls
    for i, call in enumerate(parts.tool_calls):
        assert call.pop("index") == i and len(call["id"]) == 9 and call.pop("id").isalnum()
    return parts


def read(text: str, model: str) -> tuple[str, list]:
    """The content and the calls, which are the same wherever the text is cut."""
    whole = parsed(text, [], model)
    some = sorted(random.Random(text).sample(range(len(text)), len(text) // 9))
    assert parsed(text, [*range(1, len(text))], model) == whole == parsed(text, some, model)
    calls = [call["function"] for call in whole.tool_calls]
    return whole.content, [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("model", TEMPLATES)
def test_texts_of_each_form(model):
    for seed in range(30):
        rng = random.Random(seed)
        calls = [new_call(rng) for _ in range(rng.randint(1, 3))]
        text = written(model, calls)
        before, after = rng.choice(["", "Let me see.\n\n"]), rng.choice(["", "Done: {1} <b>."])
        assert read(before + text + after, model) == (before + after, calls), (seed, text)
        cut = text[: rng.randint(8, len(text) - 3)]
        content, found = read(cut, model)
        assert found == calls[: len(found)] and (found or content == cut), cut


CITY = ("f", {"text": "Paris"})
JSON_CITY = '{"name": "f", "arguments": {"text": "Paris"}}'
WITHOUT_TAG = "<function=f>\n<parameter=text>\nParis\n</parameter>\n</function>"
OTHER_TEXTS = [
    ("Qwen3", '<tool_call>{"arguments": {"text": "Paris"}, "name": "f"}</tool_call>\n</tool_call>', ("", [CITY])),
    ("Qwen3", f"<tool_call>\n{WITHOUT_TAG}\n</tool_call>", ("", [CITY])),
    ("Qwen3", f"<tool_call>\n{JSON_CITY}\n", ("", [CITY])),
    ("Qwen3", '<tool_call>{"name": "f", "arguments": {"text": NaN}}</tool_call>', None),
    ("Qwen3", "<tool_call>\nno json\n</tool_call> <tool_call>\n\n[]</tool_call> <tool_call>\n", None),
    ("Qwen3", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>", None),
    ("Qwen3", "{" + JSON_CITY[1:], None),
    ("Qwen3.5", f"{WITHOUT_TAG}\n</tool_call>\nSo.", ("So.", [CITY])),
    ("Qwen3.5", f"a {WITHOUT_TAG}{WITHOUT_TAG}", ("a ", [CITY, CITY])),
    ("Qwen3.5", "<tool_call>\n<function=f>\n<parameter=text>\nParis\n</function>\n</tool_call>", ("", [CITY])),
    ("Qwen3.5", "<tool_call>\n<function=f>\n<parameter=text>Paris</parameter>\n</tool_call>", ("", [CITY])),
    ("Qwen3.5", "<tool_call>\n<function=f>\nParis\n</function>\n</tool_call>", None),
    ("Qwen3.5", "<tool_call>\n<function=g>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", ("", [("g", {"n": "3"})])),
    ("Qwen3.5", "<tool_call>\n<function=f>\n<parameter=count>\nthree\n</parameter>\n<parameter=is_on>\nTrue\n</parameter>\n<parameter=size>\nbig\n</parameter>\n</function>\n</tool_call>", ("", [("f", {"count": "three", "is_on": True, "size": "big"})])),
    ("Mistral v13", '[TOOL_CALLS]f{"text": "Paris"}', ("", [CITY])),
    ("Mistral v13", "[TOOL_CALLS]f[ARGS]", None),
    ("Llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"text": "Paris"}}; {"name": "f", "parameters": {"text": "Paris"}}', ("", [CITY, CITY])),
    ("Llama", '{"type": "function", "function": {"name": "f", "parameters": {"text": "Paris"}}}', ("", [CITY])),
    ("Llama", "<|python_tag|>print(1)", None),
    ("Llama", 'So: {"name": "Ann", "age": 5} and {x: [1]} {"a": {}} {', None),
]  # fmt: skip


@pytest.mark.parametrize("model, text, expected", OTHER_TEXTS)
def test_texts_that_differ_a_little(model, text, expected):
    assert read(text, model) == (expected or (text, []))


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_quotation_mark_does_not_hold_back_what_follows(model):
    """In JSON it makes the call a text; in tags it is a part of the argument."""
    text = written(model, [("f", {"text": "5' pipe"})]).replace("'", '"')
    parser = new_parser(model)
    first, then = parser.add(text), parser.add("\nDone.")
    assert (first.content + then.content).endswith("Done.")
    if model == "Qwen3.5":
        assert json.loads(first.tool_calls[0]["function"]["arguments"]) == {"text": '5" pipe'}
    else:
        assert first.content + then.content == f"{text}\nDone."


PIECES = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "[TOOL_CALLS]", "{", '{"name": "f", "parameters": {}}', "\n", "<", "think>", "</", "a", "é")  # fmt: skip
pieces = st.sampled_from(PIECES) | st.text(max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.lists(pieces, max_size=12).map("".join), st.sampled_from([*TEMPLATES, ""]))
def test_any_text_in_pieces_has_the_same_parts(text, model):
    content, calls = read(text, model)
    assert calls or "<think>" in text or content == text


# --- over HTTP ---


def test_tags_that_are_special_tokens():
    """A grammar names them by their ids, and the text of the answer has them."""
    needs("llguidance")
    llm = new_parrot()
    tags = {"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]}
    llm.inputs.vocab_size += llm.tokenizer.add_special_tokens(tags)
    llm.tokenizer.chat_template = template(TEMPLATES["Mistral v13"])
    with Running(llm) as server:
        for choice in ("auto", "required"):
            answer = server.chat("[TOOL_CALLS]stop[ARGS]{}", tools=TOOLS[1:], tool_choice=choice)
            (one,) = answer["choices"]
            assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None
            assert one["message"]["tool_calls"][0]["function"] == {
                "name": "stop",
                "arguments": "{}",
            }


NOWHERE = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weigh", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.slow(but_every=9)
@pytest.mark.parametrize("model", ["", *TEMPLATES])
def test_the_official_client_runs_tools_in_the_models_own_form(openai, model):
    """The model has random answers: the form holds them, and its template takes the calls back."""
    needs("llguidance")
    from jsonschema import validate

    llm = LLM(num_blocks=400, max_num_seqs=4)
    llm.tokenizer.chat_template = tokenizer_of(model).chat_template
    with (
        Running(llm) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        messages: list = [{"role": "user", "content": "hello"}]
        options = dict(model="org/tiny", tools=TOOLS, max_tokens=600, temperature=2.0)
        named = {"type": "function", "function": {"name": "weigh"}}
        for seed, choice in enumerate(["required", named, "required"]):
            options |= dict(seed=seed, tool_choice=choice, parallel_tool_calls=seed == 2)
            answer = client.chat.completions.create(messages=messages, **options).choices[0]
            assert answer.finish_reason == "tool_calls" and not answer.message.content
            with client.chat.completions.stream(messages=messages, **options) as stream:
                same = stream.get_final_completion().choices[0].message.tool_calls
            calls = answer.message.tool_calls
            assert [c.function.arguments for c in same] == [c.function.arguments for c in calls]
            for call in calls:
                schema = SCHEMA if call.function.name == "weigh" else {"maxProperties": 0}
                validate(json.loads(call.function.arguments), schema)
            messages.append(answer.message)
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "5"} for c in calls]
        tools = [{"type": "function", "function": {"name": "f", "parameters": NOWHERE}}]
        body = {"messages": messages[:1], "tools": tools, "tool_choice": "required"}
        assert server.refused(CHATS, body)["param"] == "tools"
