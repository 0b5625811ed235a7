"""What clients of OpenAI's API send, over real sockets: the answers are right, alike in every form, and each mistake is
one sentence that names the field.

Run: pytest tests/server/test_server.py [-k echo]
"""

import json
import math

import pytest
from server_tools import (
    CHATS,
    COMPLETIONS,
    Running,
    checked_error,
    new_parrot,
)

from nanovllm import LLM, SamplingParams

MODEL = "org/tiny"
PROMPT = "Once upon a time there was"
SMALL = {"prompt": PROMPT, "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "what is 20 + 30?"}]}
POSTS = {
    COMPLETIONS: SMALL,
    CHATS: {**CHAT, "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def running():
    llm = LLM(num_blocks=400, block_size=16, max_num_seqs=16)
    with Running(llm, served_model_name=[MODEL]) as server:
        yield server


@pytest.fixture(scope="module")
def running_parrot():
    with Running(new_parrot(), served_model_name=[MODEL]) as server:
        yield server


@pytest.fixture
def parrot(running_parrot):
    yield running_parrot
    running_parrot.check_idle()


# --- service ---


def test_health_and_version(server):
    for method in ("GET", "HEAD"):
        health = server.http.request(method, "/health")
        assert (health.status_code, health.content) == (200, b"")
    assert server.http.get("/version").json().keys() == {"version"}


def test_models(server, client, openai):
    (model,) = client.models.list().data
    assert model == client.models.retrieve(MODEL)  # its name has a slash
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 2048)
    with pytest.raises(openai.NotFoundError, match="'org/other' does not exist"):
        client.models.retrieve("org/other")


@pytest.mark.parametrize("path", POSTS)
def test_another_model_does_not_exist(server, path):
    error = server.refused(path, {**POSTS[path], "model": "gpt-5"}, 404)
    assert error["message"] == "the model 'gpt-5' does not exist" and error["param"] == "model"
    server.post(path, {**POSTS[path], "model": MODEL})
    server.post(path, {**POSTS[path], "model": None})


def test_what_no_route_answers(server):
    for path in ("/v1/nothing", "/v1/responses"):
        assert server.refused(path, {"input": "a"}, 404)["type"] == "not_found_error"
    response = server.http.get(COMPLETIONS)
    checked_error(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe", b"{}", b"[" * 100_000]
)
def test_a_body_that_is_no_object_of_this_kind(server, path, body):
    headers = {"content-type": "application/json"}
    checked_error(server.http.post(path, content=body, headers=headers), 400)


def test_a_wrong_content_type(server):
    content = json.dumps(SMALL).encode()
    for headers in ({}, {"content-type": "text/plain"}):
        response = server.http.post(COMPLETIONS, content=content, headers=headers)
        assert "application/json" in checked_error(response, 400)["message"]


FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
OF_BOTH = [
    # what is in the body, the field that the error names, and what else the message says
    ({"max_tokens": "five"}, "max_tokens", "max_tokens"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"stream_options": {"include_usage": 5}}, "stream_options", "include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options", "stream=true"),
    ({"priority": -5}, "priority", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"length_penalty": 2}, "length_penalty", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"audio": {}}, "audio", "not supported"),
    ({"best_of": 2}, "best_of", "n"),
    ({"suffix": "x"}, "suffix", "suffix is not supported: leave it out"),
]
REFUSED = [
    *((path, *row) for path in (COMPLETIONS, CHATS) for row in OF_BOTH),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens=0"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [[5], []]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt", "1.5"),
    (COMPLETIONS, {"prompt": [[5], 7]}, "prompt", "prompt=7"),
    (COMPLETIONS, {"prompt": [5] * 5000}, "prompt", "maximum context length"),  # programs look for these words
    (COMPLETIONS, {"logit_bias": {"x": 1, "5": 1, "y": 1}}, "logit_bias", "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 1, "9999": -1}}, "logit_bias", "9999"),
    (COMPLETIONS, {"logit_bias": {"5": 1, "9999": -1}}, "logit_bias", "1535"),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, "echo", "echo"),
    (COMPLETIONS, {"request_id": "a" * 257}, "request_id", "256"),
    (COMPLETIONS, {"cache_salt": ""}, "cache_salt", "cache_salt"),
    (COMPLETIONS, {"cache_salt": "a" * 257}, "cache_salt", "256"),
    (COMPLETIONS, {"cache_salt": 5}, "cache_salt", "cache_salt"),
    (CHATS, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "max_tokens"),
    (CHATS, {"max_tokens": None, "max_completion_tokens": 0}, "max_tokens", "max_tokens=0"),
    (CHATS, {"stream_options": {"include": True}}, "stream_options", "include"),
    (CHATS, {"messages": []}, "messages", "messages"),
    (CHATS, {"messages": [{"content": "a"}]}, "messages", "messages"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]}, "messages", "messages[0]"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
    (CHATS, {"top_logprobs": 2, "logprobs": False}, "top_logprobs", "logprobs"),
    (CHATS, {"logprobs": 1}, "logprobs", "logprobs"),
    (CHATS, {"response_format": {"type": "json_schema"}}, "response_format", "response_format"),
    (CHATS, {"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "response_format"),
    (CHATS, {"response_format": {"type": "xml"}}, "response_format", "xml"),
    (CHATS, {"tool_choice": "required"}, "tool_choice", "tool_choice"),
    (CHATS, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "tool_choice"),
    (CHATS, {"parallel_tool_calls": 5}, "parallel_tool_calls", "5"),
    (CHATS, {"modalities": ["text", "audio"]}, "modalities", "modalities"),
    (CHATS, {"chat_template": "{{ x }}"}, "chat_template", "not supported"),
    (CHATS, {"reasoning_effort": "much"}, "reasoning_effort", "much"),
    (CHATS, {"chat_template_kwargs": 5}, "chat_template_kwargs", "chat_template_kwargs"),
    (CHATS, {"chat_template_kwargs": {"conversation": 1}}, "chat_template_kwargs", "conversation"),
    (CHATS, {"tools": "all"}, "tools", "tools"),
    (CHATS, {"tools": [*TOOLS, {}]}, "tools", "tools[1]"),
    (CHATS, {"tools": [*TOOLS, {"type": "function"}]}, "tools", "tools[1]"),
    (CHATS, {"tools": [*TOOLS, {"type": "function", "function": {"name": ""}}]}, "tools", "tools[1]"),
    (CHATS, {"tools": [*TOOLS, {"type": "function", "function": 5}]}, "tools", "tools[1]"),
    (CHATS, {"tools": [*TOOLS, {"type": "web"}]}, "tools", "tools[1]"),
    (CHATS, {"tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools", "tools[1]"),
    (CHATS, {"continue_final_message": True}, "continue_final_message", "continue_final_message"),
    ("/tokenize", {"prompt": 5}, "prompt", "prompt"),
    ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": 5}]}, "messages", "messages"),
    ("/tokenize", {"add_special_tokens": "yes"}, "add_special_tokens", "add_special_tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens", "tokens"),
    ("/detokenize", {"tokens": [1536]}, "tokens", "tokens"),
    ("/detokenize", {"logits_processors": 1}, "logits_processors", "not supported"),
    (CHATS, {"x" * 10_000: 1}, "x" * 100, "not supported"),
    *((path, {"chat_template_kwargs": {name: False}, "prompt": None, "messages": CHAT["messages"]}, "chat_template_kwargs", name)
      for path in (CHATS, "/tokenize") for name in ("chat_template", "tokenize", "tools", "add_generation_prompt", "return_dict")),
]  # fmt: skip


@pytest.mark.parametrize("path, more, param, said", REFUSED)
def test_what_is_wrong_is_refused_with_the_name_of_its_field(server, path, more, param, said):
    error = server.refused(path, {**POSTS[path], **more})
    assert error["param"] == param and said in error["message"]


def schema_fields(server, path: str) -> dict:
    schema = server.http.get("/openapi.json").json()
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]


@pytest.mark.parametrize("path", POSTS)
def test_a_field_that_is_null_means_nothing(server, path):
    body = POSTS[path] | ({"temperature": 0} if path.startswith("/v1") else {})
    fields = schema_fields(server, path).keys() - body.keys()
    expected = server.post(path, body)
    answer = server.post(path, {**dict.fromkeys(fields, None), **body})
    for name in ("id", "created", "usage"):
        assert (name in answer) == (name in expected)
    assert answer.get("choices") == expected.get("choices")
    if not path.startswith("/v1"):
        assert answer == expected


def test_api_key(monkeypatch, running):
    """On every route but /health and the page, which asks for it: a browser must not."""
    monkeypatch.setattr(running.routes.options, "api_key", ["other", "s3cret:ü"])

    def status(method, path, authorization=None):
        headers = {} if authorization is None else {"authorization": authorization}
        response = running.http.request(method, path, headers=headers, json=POSTS.get(path))
        if response.status_code == 401:
            checked_error(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        return response.status_code

    gets = ["/metrics", "/version", "/v1/models", "/openapi.json", "/openapi.json"]
    for path in ("/health", "/", "/page.js", "/runs/index.json"):
        assert status("GET", path) == 200
    assert status("GET", "/live") == 401
    for method, path in [("POST", path) for path in POSTS] + [("GET", path) for path in gets]:
        assert status(method, path) == 401
        assert status(method, path, "Bearer s3cret:ü".encode()) == 200
    good = b"bearer s3cret:\xc3\xbc"
    assert status("GET", "/version", good) == 200
    for bad in ("Bearer", "Bearer s3cret", "s3cret:ü".encode(), "Digest x", "", b"Basic \xff"):
        assert status("GET", "/version", bad) == 401, bad


def test_pages_of_others_may_ask_if_they_are_allowed():
    """A browser asks first, without the key, and reads an error only if it is allowed to."""
    options = dict(allowed_origins=["http://there"], api_key=["key"], served_model_name=[MODEL])
    with Running(new_parrot(), **options) as server:
        asked = {"access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization"
        for origin, status in (("http://there", 200), ("http://elsewhere", 400)):
            headers = {"origin": origin, **asked}
            response = server.http.request("OPTIONS", CHATS, headers=headers)
            assert response.status_code == status
            is_allowed = response.headers.get("access-control-allow-origin") == origin
            assert is_allowed == (status == 200)
        response = server.http.get("/v1/models", headers={"origin": "http://there"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "http://there"


# --- completions ---


def numbers_of(choice: dict) -> list[float]:
    """Its log-probabilities, if it has some."""
    found = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    return [*found["token_logprobs"], *(x for row in found["top_logprobs"] for x in row.values())]


def joined(events: list[dict]) -> dict[int, dict]:
    """The choices that a stream of completions gives, by index."""
    choices: dict[int, dict] = {}
    for event in events:
        for new in event["choices"]:
            old = choices.setdefault(new["index"], {"text": "", "logprobs": None})
            assert old.get("finish_reason") is None
            old["text"] += new["text"]
            old |= {name: value for name, value in new.items() if name not in ("text", "logprobs")}
            if new["logprobs"] is not None:
                names = new["logprobs"].keys()
                before = old["logprobs"] or {key: [] for key in names}
                old["logprobs"] = {name: before[name] + new["logprobs"][name] for name in names}
    return choices


def test_text_and_ids_give_the_same(server, client):
    token_ids = server.post("/tokenize", {"prompt": PROMPT})["tokens"]
    texts = []
    for prompt in (PROMPT, token_ids, [PROMPT], [token_ids]):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
        texts.append(answer.choices[0].text)
        assert answer.usage.prompt_tokens == len(token_ids) and answer.usage.completion_tokens == 12
        assert answer.object == "text_completion" and answer.choices[0].finish_reason == "length"
    assert len({*texts}) == 1 and texts[0]
    (output,) = server.llm.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
    )
    assert output.outputs[0].text == texts[0]


def test_n_outputs_of_several_prompts_come_in_order(server):
    prompts = [PROMPT, "The sun", "Zoe"]
    answer = server.complete(prompt=prompts, n=2, max_tokens=6, seed=4)
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    alone = [server.complete(prompt=prompt, n=2, max_tokens=6, seed=4) for prompt in prompts]
    texts = [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == texts
    usages = [one["usage"] for one in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(usage[name] for usage in usages)


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
def test_logprobs_of_a_completion(server, logprobs):
    (choice,) = server.complete(prompt=PROMPT, max_tokens=8, seed=1, logprobs=logprobs)["choices"]
    found = choice["logprobs"]
    if logprobs is None:
        assert found is None
        return
    assert "".join(found["tokens"]) == choice["text"]
    for text, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert logprob <= 0 and top[text] == logprob
        assert max(1, logprobs) <= len(top) <= logprobs + 1
        assert sum(math.exp(p) for p in top.values()) < 1.0001


@pytest.mark.parametrize("max_tokens", [5, 0])
def test_echo(server, max_tokens):
    """Without an answer, no tokens of one are counted."""
    plain = server.complete(prompt=PROMPT, max_tokens=5, temperature=0)["choices"][0]["text"]
    body = dict(prompt=PROMPT, max_tokens=max_tokens, temperature=0, echo=True)
    answer = server.complete(**body)
    text = PROMPT + (plain if max_tokens else "")
    assert answer["choices"][0]["text"] == text and answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == max_tokens
    *events, last = server.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert joined(events)[0]["text"] == text
    details = {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert last["usage"] == answer["usage"] | details


@pytest.mark.parametrize("prompt", ["añb ☃ é", "日本 \U0001f600!"])
def test_the_echo_of_ids_is_their_text(server, prompt):
    """Also where a character has several tokens."""
    token_ids = server.post("/tokenize", {"prompt": prompt})["tokens"]
    assert len(token_ids) > len(prompt)
    answer = server.complete(prompt=token_ids, max_tokens=1, echo=True, temperature=0)
    assert answer["choices"][0]["text"].startswith(prompt)


def test_the_logprobs_of_an_echo(server):
    token_ids = server.post("/tokenize", {"prompt": PROMPT})["tokens"]
    body = dict(prompt=PROMPT, max_tokens=3, temperature=0, logprobs=1)
    plain = server.complete(**body)["choices"][0]["logprobs"]
    answer = server.complete(**body, echo=True)
    found = answer["choices"][0]["logprobs"]
    assert {len(values) for values in found.values()} == {len(token_ids) + 3}
    assert "".join(found["tokens"]) == answer["choices"][0]["text"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(p <= 0 for p in found["token_logprobs"][1:])
    assert found["token_logprobs"][-3:] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    # what an evaluation wants: the prompt only, and whether each token is the likeliest
    (scored,) = server.complete(**{**body, "max_tokens": 0, "echo": True})["choices"]
    assert scored["text"] == PROMPT and len(scored["logprobs"]["tokens"]) == len(token_ids)
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(
        found["token_logprobs"][1:-3], abs=1e-4
    )
    with_one = server.complete(**{**body, "max_tokens": 1, "echo": True})["choices"][0]["logprobs"]
    assert with_one["token_logprobs"][-1] == max(with_one["top_logprobs"][-1].values())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 3},
        {"n": 3},
        {"prompt": [PROMPT, "The sun"], "n": 2, "logprobs": 0},
        {"stop": [" a", "e"]},
        {"stop": "th", "include_stop_str_in_output": True, "logprobs": 1},
        {"prompt": "añb ☃ é", "temperature": 2},
    ],
)
def test_a_stream_joined_is_the_whole_answer(server, more):
    body = {"prompt": PROMPT, "max_tokens": 14, "seed": 3, **more}
    whole = server.complete(**body)
    *events, last = server.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    choices = joined(events)
    assert len(choices) == len(whole["choices"])
    for choice in whole["choices"]:
        found = choices[choice["index"]]
        # a sum may round otherwise among more sequences
        assert numbers_of(found) == pytest.approx(numbers_of(choice), abs=1e-4)
        assert {**found, "logprobs": 0} == {**choice, "logprobs": 0}
    assert last["choices"] == [] and not any("usage" in event for event in events)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    # one chunk for each token, and the reason is in the last one's
    assert sum(len(event["choices"]) for event in events) == whole["usage"]["completion_tokens"]
    assert len({event["id"] for event in [*events, last]}) == 1
    assert {event["object"] for event in events} == {"text_completion"}


def test_a_bias_makes_the_token(server):
    token_id = server.post("/tokenize", {"prompt": " dog"})["tokens"][0]
    body = dict(prompt=PROMPT, max_tokens=3, logit_bias={str(token_id): 100}, temperature=0)
    text = server.post("/detokenize", {"tokens": [token_id] * 3})["prompt"]
    assert server.complete(**body)["choices"][0]["text"] == text


def test_a_stop_string_over_several_tokens(parrot):
    text = "The quick brown fox jumps over the lazy dog."
    for seed in (None, *range(8)):
        for stop, kept in (("brown fox", "The quick "), (["lazy", "x jum"], "The quick brown fo")):
            body = {"prompt": text, "stop": stop, "seed": seed, "logprobs": 0, "max_tokens": 200}
            (choice,) = parrot.complete(**body)["choices"]
            assert choice["text"] == kept and choice["finish_reason"] == "stop"
            assert choice["stop_reason"] == (stop if isinstance(stop, str) else stop[1])
            assert "".join(choice["logprobs"]["tokens"]).startswith(kept)
            streamed = joined(parrot.events(COMPLETIONS, body))[0]
            assert streamed["text"] == kept and streamed["logprobs"] == choice["logprobs"]
            (choice,) = parrot.complete(**body, include_stop_str_in_output=True)["choices"]
            assert choice["text"] in ("The quick brown fox", "The quick brown fox jum")


def test_a_stop_token_says_so(parrot):
    token_id = parrot.post("/tokenize", {"prompt": " fox"})["tokens"][0]
    for stop_ids, text, reason in (([token_id], "a", token_id), ([], "a fox and", None)):
        (choice,) = parrot.complete(prompt="a fox and", stop_token_ids=stop_ids)["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text, reason)
        assert choice["finish_reason"] == "stop"


# --- chats ---


def chat_joined(events: list[dict]) -> dict[int, dict]:
    """The messages that a stream of a chat gives, by index."""
    choices: dict[int, dict] = {}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for new in event["choices"]:
            is_first = new["index"] not in choices
            one = choices.setdefault(
                new["index"], {"content": "", "reasoning": "", "tool_calls": [], "logprobs": []}
            )
            assert new["delta"].pop("role", None) == ("assistant" if is_first else None)
            assert one.get("finish_reason") is None
            one["finish_reason"] = new["finish_reason"]
            one["content"] += new["delta"].pop("content") or ""
            one["reasoning"] += new["delta"].pop("reasoning", "")
            one["tool_calls"] += new["delta"].pop("tool_calls", [])
            new["delta"].pop("reasoning_content", None)
            assert new["delta"] == {}
            one["logprobs"] += (new["logprobs"] or {}).get("content", [])
    return choices


def test_the_official_client_chats(client, openai):
    messages = [{"role": "user", "content": "what is 20 + 30?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and "50" in choice.message.content
    assert choice.finish_reason == "stop" and answer.object == "chat.completion"
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True, stream_options=options
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.usage.completion_tokens == answer.usage.completion_tokens == len(chunks)
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=messages, temperature=0) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == choice.message.content
    with pytest.raises(openai.BadRequestError, match="temperature=5e\\+99 is not allowed") as info:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=5e99)
    assert info.value.param == "temperature" and info.value.type == "invalid_request_error"


def test_the_length_of_an_answer(server):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = server.chat("tell me a story", **{name: 5}, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_content_of_parts(parrot):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    answer = parrot.post(CHATS, {"messages": messages})
    assert answer["choices"][0]["message"]["content"] == "one\ntwo"


@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_logprobs_of_a_chat(server, top):
    body = {**CHAT, "logprobs": True, "top_logprobs": top, "seed": 1, "max_tokens": 9}
    (choice,) = server.post(CHATS, body)["choices"]
    content = choice["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text.startswith(choice["message"]["content"])
    for entry in content:
        assert len(entry["top_logprobs"]) == (top or 0) and entry["logprob"] <= 0
        likeliest = [one["logprob"] for one in entry["top_logprobs"]]
        assert likeliest == sorted(likeliest, reverse=True)
    streamed = chat_joined(server.events(CHATS, body))[0]
    assert [one["token"] for one in streamed["logprobs"]] == [one["token"] for one in content]
    logprobs = [one["logprob"] for one in content]  # those of a cached prompt differ by rounding
    assert [one["logprob"] for one in streamed["logprobs"]] == pytest.approx(logprobs, abs=1e-4)


ANYWAY = {
    "audio": None, "prediction": None, "verbosity": None, "reasoning_effort": None, "anything": None,
    "n": 1, "use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "functions": [],
    "documents": [], "vllm_xargs": {}, "user": "me", "metadata": {"a": "b"}, "store": True,
    "suffix": None, "priority": 0, "seed": -1, "prompt_cache_retention": "24h",
}  # fmt: skip
OF_CHATS = {"echo": False, "include_reasoning": True, "parallel_tool_calls": False, "tools": []}
STREAMED = {"include_usage": None, "continuous_usage_stats": False, "include_obfuscation": False}


@pytest.mark.parametrize(
    "path, more",
    [
        (COMPLETIONS, ANYWAY),
        (CHATS, ANYWAY | OF_CHATS),
        (CHATS, {"response_format": {"type": "text"}}),  # others need an extra: test_formats.py
        (CHATS, {"tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]}),
        (CHATS, {"tool_choice": "auto", "parallel_tool_calls": False}),
        (CHATS, {"reasoning_effort": "high", "chat_template_kwargs": {}}),
        (CHATS, {"reasoning_effort": "none"}),
        (CHATS, {"chat_template_kwargs": {"enable_thinking": True}, "logprobs": False}),
    ],
)
def test_what_changes_no_answer_or_is_done_is_accepted(server, path, more):
    answer = server.post(path, {**POSTS[path], **more})
    assert answer["choices"][0]["logprobs"] is None
    events = server.events(path, {**POSTS[path], **more, "stream_options": STREAMED})
    assert all(event["choices"] and "usage" not in event for event in events)


def message_of(parrot, text: str, **body) -> dict:
    """What comes of a text that the model says: the same, streamed or not."""
    (choice,) = parrot.chat(text, **body)["choices"]
    message = choice["message"]
    assert message.pop("role") == "assistant"
    assert message.get("reasoning") == message.pop("reasoning_content", None)
    messages = [{"role": "user", "content": text}]
    streamed = chat_joined(parrot.events(CHATS, {"messages": messages, **body}))[0]
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == message.get("reasoning", "")
    for i, call in enumerate(message.get("tool_calls", [])):
        other = streamed["tool_calls"][i]
        assert other["index"] == i and other["function"] == call["function"]
        assert call.pop("id") != other["id"]
    assert len(streamed["tool_calls"]) == len(message.get("tool_calls", []))
    return message | {"finish_reason": choice["finish_reason"]}


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
BAD = '<tool_call>{"name": "a", "arguments": {"b": "\\ud800"}}</tool_call>'
SAID = {
    # the reasoning, the content, and the arguments of each call
    "<think>\nhm, 5.\n</think>\n\nIt is 5.": ("hm, 5.\n", "It is 5."),
    "<think>for ever": ("for ever", ""),
    "no <think>tags</think>": ("", "no <think>tags</think>"),
    "</think>": ("", "</think>"),
    f"<think>I add.</think>Well:\n{CALL}\n{CALL}": ("I add.", "Well:\n", {"a": 1, "b": "é"}, {"a": 1, "b": "é"}),
    CALL: ("", None, {"a": 1, "b": "é"}),
    '<tool_call>{"name":"f","arguments":null}</tool_call>': ("", None, {}),
    '<tool_call>{"name":"f","arguments":{"a":"\\"</tool_call>"}}</tool_call>': ("", None, {"a": '"</tool_call>'}),
    BAD: ("", BAD),
}  # fmt: skip


@pytest.mark.parametrize("text", SAID)
def test_reasoning_and_calls_of_tools_are_apart_wherever_they_are_cut(parrot, text):
    reasoning, content, *calls = SAID[text]
    for seed in (None, 0, 1):
        message = message_of(parrot, text, tools=TOOLS, seed=seed)
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
        made = message.get("tool_calls", [])
        assert {call["type"] for call in made} <= {"function"}
        assert {call["function"]["name"] for call in made} <= {"add", "f"}
        assert [json.loads(call["function"]["arguments"]) for call in made] == calls
        assert message["finish_reason"] == ("tool_calls" if calls else "stop")


def test_reasoning_that_the_template_opens_or_closes(parrot):
    message = message_of(parrot, "so</think>five", chat_template_kwargs={"opens_thinking": True})
    assert (message["reasoning"], message["content"]) == ("so", "five")
    message = message_of(parrot, "five", chat_template_kwargs={"enable_thinking": False})
    assert message["content"] == "five" and "reasoning" not in message
    message = message_of(parrot, "<think>a</think>five")
    assert (message["reasoning"], message["content"]) == ("a", "five")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "begun, text, expected",
    [
        ("<think>\nI", " am</think>five", (" am", "five")),
        ("<think>a</think>so", " far", ("", " far")),
        ("so", " far", ("", " far")),
        ([{"type": "text", "text": "<think>I"}], " am</think>five", (" am", "five")),
    ],
)
def test_a_conversation_is_continued_within_its_reasoning(parrot, begun, text, expected, stream):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    if stream:
        parts = [event["choices"][0]["delta"] for event in parrot.events(CHATS, body)]
    else:
        parts = [parrot.post(CHATS, body)["choices"][0]["message"]]
    found = ("".join(part.get(name) or "" for part in parts) for name in ("reasoning", "content"))
    assert (*found,) == expected


def test_calls_of_tools_that_are_not_wanted(parrot):
    message = message_of(parrot, f"{CALL}\n{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1 and message["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1, "b": "é"}',
    }
    for more in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        message = message_of(parrot, CALL, **more)
        assert message["content"] == CALL and message["finish_reason"] == "stop"


# --- tokens, metrics ---


def test_text_becomes_tokens_and_text_again(server):
    for text in ("", PROMPT, "añb ☃ \U0001f600", "<|im_start|>user"):
        answer = server.post("/tokenize", {"prompt": text})
        assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 2048
        assert answer["tokens"] == server.llm.tokenizer.encode(text)
        assert server.post("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    count = server.post("/tokenize", CHAT)["count"]
    answer = server.post(CHATS, {**CHAT, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == count


def test_metrics_add_up(server):
    before = server.metrics()
    body = dict(prompt=PROMPT, max_tokens=4, ignore_eos=True)
    usages = [server.complete(**body, n=2)["usage"] for _ in range(3)]
    usages.append(server.chat("what is 2 + 2?")["usage"])
    *_, last = server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    usages.append(last["usage"])
    after = server.metrics()
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert new["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert new["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert new["prefix_cache_hits_total"] == cached
    assert new['request_success_total{finished_reason="length"}'] == 7
    assert new['request_success_total{finished_reason="stop"}'] == 1
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert new[f"{name}_seconds_count"] == 8  # of each output
    num_prompt = sum(usage["prompt_tokens"] for usage in usages[:3] + usages)  # n=2
    assert new["request_prompt_tokens_sum"] == num_prompt
    assert new["request_generation_tokens_sum"] == num_tokens
    parts = [f"request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")]
    assert 0 < sum(new[part] for part in parts) <= new["e2e_request_latency_seconds_sum"]
    assert new["inter_token_latency_seconds_count"] == num_tokens - 8
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[gauge] == 0


# --- what clients mean ---


def test_logprobs_have_the_bytes_of_their_tokens(parrot):
    """Those of a part of a character, too: a client joins them."""
    text = "a\U0001f600é☃b"
    for seed in (None, 1, 2):
        answer = parrot.chat(text, logprobs=True, top_logprobs=0, seed=seed)
        *entries, _ = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) > len(text)
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()


def test_parts_of_a_character_have_names_of_their_own(server, parrot):
    body = {"prompt": "a\U0001f600b", "logprobs": 1}
    echo = server.complete(**body, max_tokens=1, echo=True, temperature=0)["choices"][0]
    for choice in (echo, joined(parrot.events(COMPLETIONS, body))[0]):
        found = choice["logprobs"]
        emoji = [name for name in found["tokens"] if name.startswith("bytes:")]
        assert len(emoji) > 1 and "".join(emoji).replace("bytes:", "") == "\\xf0\\x9f\\x98\\x80"


def test_the_usage_of_each_event(server):
    body = dict(prompt=PROMPT, max_tokens=4, ignore_eos=True, temperature=0)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = server.events(COMPLETIONS, {**body, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4]
    assert events[-1]["usage"]["total_tokens"] == last["usage"]["total_tokens"]
