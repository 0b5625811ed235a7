"""Tool calls in the form that the chat template has: read whole and in pieces, forced by a grammar, sent back.

Run: pytest tests/server/test_tool_calls.py
"""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_tools import Running

from nanovllm import LLM
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.loader import load_tokenizer
from nanovllm.topics.server import tool_calls
from nanovllm.topics.server.parsing import Parser, Parts
from nanovllm.topics.server.tool_calls import FORMS, UNKNOWN, form_of
from tests.tools.extras import needs

XML_FORM, TAG_FORM, LIST_FORM, LIST_3, ARGS_13, BARE = FORMS
# what templates of these models write for a message with calls
XML = "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments|items %}<parameter={{ k }}>\n{{ v if v is string else v|tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
ONE = "{% if m.tool_calls|length != 1 or c.id|length != 9 %}{{ raise_exception('no') }}{% endif %}"
TEMPLATES = {
    XML_FORM.words: f"EACH{XML}END",
    TAG_FORM.words: 'EACH<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}\n</tool_call>END',
    LIST_FORM.words: "<tool_call>[EACH{{ c.function|tojson }}{{ ', ' if not loop.last }}END]</tool_call>",
    LIST_3.words: "[TOOL_CALLS] [EACH{{ (c.function|tojson)[:-1] }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last }}END]",
    ARGS_13.words: "EACH[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments|tojson }}END",
    BARE.words: f'EACH{ONE}{{"name": "{{{{ c.function.name }}}}", "parameters": {{{{ c.function.arguments|tojson }}}}}}END',
    UNKNOWN.words: "",
}  # fmt: skip


def template(call: str) -> str:
    """Its first lines explain tools in another form, as templates do."""
    call = call.replace("EACH", "{% for c in m.tool_calls %}").replace("END", "{% endfor %}")
    tools = "{% if tools %}<|im_start|>system\n<tool_call>{..}</tool_call> {{ tools|tojson }}<|im_end|>\n{% endif %}"
    calls = f"{{% if m.tool_calls %}}{call}{{% endif %}}"
    message = f"<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{calls}<|im_end|>\n"
    return f"{tools}{{% for m in messages %}}{message}{{% endfor %}}<|im_start|>assistant\n"


def test_the_template_says_which_form_the_model_knows():
    tokenizer = load_tokenizer(Path(EMBEDDED_MODEL))
    others = ["{{ raise_exception('no') }}", "call {{ m.tool_calls }}"]
    for words, call in [*TEMPLATES.items(), *((UNKNOWN.words, call) for call in others)]:
        tokenizer.chat_template = template(call)
        assert form_of(tokenizer).words == words


# --- texts ---

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
        "count": {"type": "integer", "minimum": 1, "maximum": 3},
        "size": {"enum": [1.5, 2, None]},
        "is_on": {"type": "boolean"},
        "items": {"type": ["array", "null"], "items": {"type": "boolean"}, "maxItems": 1},
        "more": {"$ref": "#/$defs/more"},
        "kind": {"anyOf": [{"enum": ["kg", 'a "b"']}, {"type": "null"}]},
    },
    "required": ["text", "count", "items", "more", "kind"],
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
    text = "".join(rng.choices(WORDS, k=3)).replace("</function></tool_call>", "")
    return "f", {"text": text, **values}


def written(form, calls) -> str:
    """As the model writes them."""
    items = []
    for name, arguments in calls:
        text = json.dumps(arguments, ensure_ascii=False)
        if form is XML_FORM:
            values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
            text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        items.append(form.call.replace("NAME", name).replace("ARGUMENTS", text))
    before, *between, after = form.calls.split("%")
    return before + (between or ["; "])[0].join(items) + after


def parsed(text: str, cuts: list[int], form) -> Parts:
    parser = Parser(None, True, None, form, FUNCTIONS)
    parts = Parts()
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        new = parser.add(text[begin:end], is_last=end == len(text))
        parts.reasoning += new.reasoning
        parts.content += new.content
        parts.tool_calls += new.tool_calls
    for i, call in enumerate(parts.tool_calls):
        assert call.pop("index") == i and len(call["id"]) == 9 and call.pop("id").isalnum()
    return parts


def read(text: str, form) -> tuple[str, list]:
    """The content and the calls, which are the same wherever the text is cut."""
    whole = parsed(text, [], form)
    some = sorted(random.Random(text).sample(range(len(text)), len(text) // 9))
    assert parsed(text, [*range(1, len(text))], form) == whole == parsed(text, some, form)
    calls = [call["function"] for call in whole.tool_calls]
    return whole.content, [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.words)
def test_texts_of_each_form(form):
    for seed in range(30):
        rng = random.Random(seed)
        calls = [new_call(rng) for _ in range(rng.randint(1, 3))]
        text = written(form, calls)
        before, after = rng.choice(["", "Let me see.\n\n"]), rng.choice(["", "Done: {1} <b>."])
        assert read(before + text + after, form) == (before + after, calls), (seed, text)
        cut = text[: rng.randint(8, len(text) - 3)]
        content, found = read(cut, form)
        assert found == calls[: len(found)] and (found or content == cut), cut


CITY = ("f", {"text": "Paris"})
WITHOUT_TAG = "<function=f>\n<parameter=text>\nParis\n</parameter>\n</function>"
OTHER_TEXTS = [
    (TAG_FORM, '<tool_call>\n{"name": "f", "arguments": {"text": "5" pipe"}}\n</tool_call>\nDone.', None),
    (TAG_FORM, '<tool_call>{"arguments": {"text": "Paris"}, "name": "f"}</tool_call>\n</tool_call>', ("", [CITY])),
    (TAG_FORM, f"<tool_call>\n{WITHOUT_TAG}\n</tool_call>", ("", [CITY])),
    (XML_FORM, f"{WITHOUT_TAG}\n</tool_call>\nSo.", ("So.", [CITY])),
    (XML_FORM, f"a {WITHOUT_TAG}{WITHOUT_TAG}", ("a ", [CITY, CITY])),
    (XML_FORM, "<tool_call>\n<function=f>\n<parameter=text>\nParis\n</function>\n</tool_call>", ("", [CITY])),
    (XML_FORM, "<tool_call>\n<function=f>\n<parameter=text>Paris</parameter>\n</tool_call>", ("", [CITY])),
    (XML_FORM, "<tool_call>\n<function=f>\nParis\n</function>\n</tool_call>", None),
    (XML_FORM, "<tool_call>\n<function=g>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", ("", [("g", {"n": "3"})])),
    (XML_FORM, "<tool_call>\n<function=f>\n<parameter=count>\nthree\n</parameter>\n<parameter=is_on>\nTrue\n</parameter>\n<parameter=size>\nNone\n</parameter>\n</function>\n</tool_call>", ("", [("f", {"count": "three", "is_on": True, "size": None})])),
    (TAG_FORM, '<tool_call>{"name": "f", "arguments": {"text": NaN}}</tool_call>', None),
    (LIST_3, '[TOOL_CALLS] [{"name": "f", "arguments": {"text": "Paris"}, "id": "VvvODy9mT"}]', ("", [CITY])),
    (ARGS_13, '[TOOL_CALLS]f[CALL_ID]VvvODy9mT[ARGS]{"text": "Paris"}', ("", [CITY])),
    (ARGS_13, '[TOOL_CALLS]f{"text": "Paris"}', ("", [CITY])),
    (ARGS_13, "[TOOL_CALLS]f[ARGS]", None),
    (BARE, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"text": "Paris"}}; {"name": "f", "parameters": {"text": "Paris"}}', ("", [CITY, CITY])),
    (BARE, '{"type": "function", "function": {"name": "f", "parameters": {"text": "Paris"}}}', ("", [CITY])),
    (BARE, '{"function": "f", "parameters": {"text": "Paris"}}', ("", [CITY])),
    (BARE, "<|python_tag|>print(1)", None),
    (BARE, 'So: {"name": "Ann", "age": 5} and {x: [1]} {"a": {}} {', None),
]  # fmt: skip


@pytest.mark.parametrize("form, text, expected", OTHER_TEXTS)
def test_texts_that_differ_a_little(form, text, expected):
    assert read(text, form) == (expected or (text, []))


PIECES = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "[TOOL_CALLS]", "{", '{"name": "f", "parameters": {}}', "\n", "<", "think>", "</", "a", "é")  # fmt: skip
pieces = st.sampled_from(PIECES) | st.text(max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.lists(pieces, max_size=12).map("".join), st.sampled_from([*FORMS, UNKNOWN]))
def test_any_text_in_pieces_has_the_same_parts(text, form):
    content, calls = read(text, form)
    assert calls or "<think>" in text or content == text


LONG = [
    ("TAG", '<tool_call>{"name": "f", "arguments": {"text": "', '"}}</tool_call>'),
    ("ELEMENTS", "<function=f><parameter=text>", "</parameter></function>"),
    ("JSON", '[TOOL_CALLS][{"name": "f", "arguments": {"text": "', '"}}]'),
]


@pytest.mark.parametrize("marks, begin, end", LONG)
def test_a_text_of_tags_is_searched_once(monkeypatch, marks, begin, end):
    """600 tags in a string, four tokens each."""
    stored = getattr(tool_calls, marks)
    searched = []

    class Counting:
        def finditer(self, text, begin=0):
            searched.append(len(text) - begin)
            return stored.finditer(text, begin)

    monkeypatch.setattr(tool_calls, marks, Counting())
    parser = Parser(None, True, functions=FUNCTIONS)
    pieces = ["</", "tool", "_call", ">"] * 600
    assert all(parser.add(piece) == Parts() for piece in (begin, *pieces))
    (call,) = parser.add(end).tool_calls
    assert json.loads(call["function"]["arguments"]) == {"text": "".join(pieces)}
    assert 0 < sum(searched) < 9 * len("".join(pieces))


# --- over HTTP ---

NOWHERE = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weigh", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("words", TEMPLATES)
def test_the_official_client_runs_tools_in_the_models_own_form(openai, words):
    """The model has random answers: the form holds them, and its template takes the calls back."""
    needs("llguidance")
    from jsonschema import validate

    llm = LLM(num_blocks=400, max_num_seqs=4)
    llm.tokenizer.chat_template = template(TEMPLATES[words])
    with (
        Running(llm) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client,
    ):
        messages: list = [{"role": "user", "content": "hello"}]
        options = dict(model="org/tiny", tools=TOOLS, max_tokens=400, temperature=2.0)
        named = {"type": "function", "function": {"name": "weigh"}}
        for seed, choice in enumerate(["required", named, "required", named, "required"]):
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
        assert server.refused("/v1/chat/completions", body)["param"] == "tools"
