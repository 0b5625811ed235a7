"""Answers in a form that the client asks for: response_format, forced calls of tools, structured_outputs.

Run: pytest tests/server/test_formats.py
"""

import json

import pytest
from server_tools import CHATS, Running, new_parrot

from nanovllm import LLM
from tests.tools.extras import needs

needs("llguidance")
CHAT = {"messages": [{"role": "user", "content": "what is 20 + 30?"}]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def new_tool(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [new_tool("greet", PERSON), {"type": "function", "function": {"name": "stop"}}]
MODEL = "org/tiny"


@pytest.fixture(scope="module")
def running():
    with Running(LLM(num_blocks=400, max_num_seqs=16), served_model_name=[MODEL]) as server:
        yield server


def is_person(value) -> bool:
    is_whole = isinstance(value, dict) and value.keys() == {"name", "age"}
    return is_whole and value["name"].isalpha() and 0 <= value["age"] <= 99


JSON_SCHEMA = {"name": "person", "strict": True, "schema": PERSON}
SCHEMA = {"type": "json_schema", "json_schema": JSON_SCHEMA}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more", [{"temperature": 0}, {"seed": 5, "n": 3, "logprobs": True, "top_logprobs": 2}]
)
def test_a_schema(server, stream, more):
    body = {**CHAT, "response_format": SCHEMA, "max_tokens": 200, **more}
    texts: dict[int, str] = {}
    if stream:
        for event in server.events(CHATS, body):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"]["content"]
    else:
        texts = {c["index"]: c["message"]["content"] for c in server.post(CHATS, body)["choices"]}
    assert len(texts) == more.get("n", 1)
    assert all(is_person(json.loads(text)) for text in texts.values())


def test_any_object(server):
    """Which may be cut off: this model likes to write spaces."""
    body = {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 0}
    assert server.post(CHATS, body)["choices"][0]["message"]["content"].startswith("{")
    answer = server.post(CHATS, {**body, "response_format": {"type": "text"}})
    assert "content" in answer["choices"][0]["message"]


@pytest.mark.parametrize(
    "outputs, allowed",
    [({"choice": ["yes", "no"]}, {"yes", "no"}), ({"regex": "a{3}|b"}, {"aaa", "b"})],
)
def test_the_forms_of_vllm(server, outputs, allowed):
    for seed in range(3):
        answer = server.complete(
            prompt="Once", max_tokens=20, seed=seed, structured_outputs=outputs
        )
        assert answer["choices"][0]["text"] in allowed
        chat = server.post(CHATS, {**CHAT, "seed": seed, "structured_outputs": outputs})
        assert chat["choices"][0]["message"]["content"] in allowed


@pytest.mark.parametrize(
    "more, param, said",
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "response_format", "objekt"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}}, "response_format", "Unimplemented"),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs", "give one"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs", "tools and"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "response_format", "schema=True"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs", "at character 2"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs", "rejex"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_its_place(server, more, param, said):
    error = server.refused(CHATS, {**CHAT, **more})
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize("choice", [None, {"type": "function", "function": {"name": "greet"}}])
def test_reasoning_comes_before_a_form(choice):
    """If the template opens it, and a token closes it. This model repeats what it is told."""
    person = '{"name":"ada","age":9}'
    said = person
    more = {"tools": TOOLS, "tool_choice": choice} if choice else {"response_format": SCHEMA}
    if choice:
        person = '{"name": "ada", "age": 9}'
        said = f'<tool_call>{{"name": "greet", "arguments": {person}}}</tool_call>'
    for opens, text in ((True, "so</think>" + said), (False, said)):
        llm = new_parrot()
        llm.inputs.vocab_size += llm.tokenizer.add_tokens(["</think>"])
        body = {"messages": [{"role": "user", "content": text}], **more}
        body["chat_template_kwargs"] = {"opens_thinking": opens}
        with Running(llm) as server:
            message = server.post(CHATS, body)["choices"][0]["message"]
            deltas = [event["choices"][0]["delta"] for event in server.events(CHATS, body)]
        reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
        assert reasoning == message.get("reasoning", "") == ("so" if opens else "")
        found = message["tool_calls"][0]["function"]["arguments"] if choice else message["content"]
        assert json.loads(found) == json.loads(person)


def test_the_official_client_parses_an_answer(server, client):
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=5)
        age: int = Field(ge=0, le=99)

    answer = client.chat.completions.parse(
        model=MODEL, messages=CHAT["messages"], response_format=Person, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
