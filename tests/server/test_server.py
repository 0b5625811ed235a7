"""What clients of OpenAI's API send, over real sockets: the answers are right, alike in every form, and each mistake is
one sentence that names the field.

Run: pytest tests/server/test_server.py [-k echo]
"""

import asyncio
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_tools import Running, checked_error, left_idle, new_parrot

from nanovllm import LLM, SamplingParams
from nanovllm.topics.server.parsing import Parser, Parts

MODEL = "org/tiny"
PROMPT = "Once upon a time there was"
SMALL = {"prompt": PROMPT, "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "what is 20 + 30?"}]}
POSTS = {
    "/v1/completions": SMALL,
    "/v1/chat/completions": {**CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
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
    with left_idle(running_parrot):
        yield running_parrot


# --- service ---


def test_health_and_version(server):
    health = server.http.get("/health")
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
    assert checked_error(server.http.get("/v1/nothing"), 404)["type"] == "not_found_error"
    response = server.http.get("/v1/completions")
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
        response = server.http.post("/v1/completions", content=content, headers=headers)
        assert "application/json" in checked_error(response, 400)["message"]


@pytest.mark.parametrize(
    "path, name, value",
    [
        # each route of completions: a wrong type, a value that the engine refuses, a part of a field
        *((path, "max_tokens", "five") for path in [*POSTS][:2]),
        *((path, "temperature", -1) for path in [*POSTS][:2]),
        *((path, "stream_options", {"include_usage": 5}) for path in [*POSTS][:2]),
        ("/tokenize", "prompt", 5),
        ("/tokenize", "messages", [{"role": "user", "content": 5}]),
        ("/tokenize", "add_special_tokens", "yes"),
        ("/detokenize", "tokens", ["a"]),
        ("/detokenize", "tokens", [1536]),
        ("/v1/chat/completions", "messages", []),
        ("/v1/chat/completions", "messages", [{"content": "a"}]),
        ("/v1/chat/completions", "tools", "all"),
        ("/v1/completions", "prompt", {"text": "a"}),
        ("/v1/completions", "prompt", [[5], []]),
        ("/v1/completions", "prompt", []),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(server, path, name, value):
    base = {} if path == "/tokenize" else POSTS[path]
    error = server.refused(path, {**base, name: value})
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize("path", [path for path in POSTS if path != "/tokenize"])
@pytest.mark.parametrize("name", ["suffixes", "logits_processors", "x" * 10_000])
def test_a_field_that_is_not_supported_is_refused_by_its_name(server, path, name):
    error = server.refused(path, {**POSTS[path], name: 1})
    assert error["param"] == name[:100] and "not supported" in error["message"]


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


@pytest.mark.slow(but_every=5)
@pytest.mark.parametrize("path", POSTS)
def test_a_megabyte_in_a_field_is_not_in_the_message(server, path):
    long = "x" * 2**17
    some = long[: 2**13]
    bodies: list = [{**POSTS[path], long: 1}, {**POSTS[path], "model": long}]
    for name in schema_fields(server, path):
        values = (some, [{some: some}], {some: [some]}, int("9" * 4000))
        bodies += [{**POSTS[path], name: value} for value in values]
    bodies += [{name: {"a": long}} for name in POSTS[path]]
    for body in bodies:
        response = server.http.post(path, json=body)
        if response.status_code != 200:
            assert response.status_code in (400, 404, 413)
            checked_error(response, response.status_code)


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
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        for origin, status in (("http://there", 200), ("http://elsewhere", 400)):
            headers = {"origin": origin, **asked}
            response = server.http.request("OPTIONS", "/v1/chat/completions", headers=headers)
            assert response.status_code == status
            is_allowed = response.headers.get("access-control-allow-origin") == origin
            assert is_allowed == (status == 200)
        response = server.http.get("/v1/models", headers={"origin": "http://there"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "http://there"


# --- completions ---


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
    streamed = joined(
        server.events("/v1/completions", dict(prompt=prompts, n=2, max_tokens=6, seed=4))
    )
    assert [streamed[i]["text"] for i in range(6)] == texts


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
def test_logprobs_of_a_completion(server, logprobs):
    (choice,) = server.complete(prompt=PROMPT, max_tokens=8, seed=1, logprobs=logprobs)["choices"]
    found = choice["logprobs"]
    if logprobs is None:
        assert found is None
        return
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(8)]
    for text, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert logprob <= 0 and top[text] == logprob
        assert max(1, logprobs) <= len(top) <= logprobs + 1
        assert sum(math.exp(p) for p in top.values()) < 1.0001


def test_echo(server):
    plain = server.complete(prompt=PROMPT, max_tokens=5, temperature=0)
    answer = server.complete(prompt=PROMPT, max_tokens=5, temperature=0, echo=True)
    assert answer["choices"][0]["text"] == PROMPT + plain["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["logprobs"] is None
    body = dict(prompt=PROMPT, max_tokens=5, temperature=0, echo=True)
    assert joined(server.events("/v1/completions", body))[0]["text"] == answer["choices"][0]["text"]


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
    assert (
        server.refused("/v1/completions", {**body, "echo": True, "stream": True})["param"] == "echo"
    )
    # what an evaluation wants: the prompt only, and whether each token is the likeliest
    (scored,) = server.complete(**{**body, "max_tokens": 0, "echo": True})["choices"]
    assert scored["text"] == PROMPT and len(scored["logprobs"]["tokens"]) == len(token_ids)
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(
        found["token_logprobs"][1:-3], abs=1e-4
    )
    with_one = server.complete(**{**body, "max_tokens": 1, "echo": True})["choices"][0]["logprobs"]
    assert with_one["token_logprobs"][-1] == max(with_one["top_logprobs"][-1].values())


def test_an_echo_without_an_answer_counts_no_tokens_of_one(server):
    body = dict(prompt=PROMPT, max_tokens=0, echo=True)
    answer = server.complete(**body)
    assert answer["choices"][0]["text"] == PROMPT and answer["usage"]["completion_tokens"] == 0
    *events, last = server.events(
        "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    assert joined(events)[0]["text"] == PROMPT and last["usage"] == answer["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    server.refused("/v1/completions", {"prompt": PROMPT, "max_tokens": 0})


def test_logprobs_of_the_prompt(server):
    num_tokens = server.post("/tokenize", {"prompt": PROMPT})["count"]
    (choice,) = server.complete(**SMALL, prompt_logprobs=2)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == num_tokens - 1
    assert {len(row) for row in others} <= {2, 3}
    answer = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1, "prompt_logprobs": 0})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    error = server.refused("/v1/completions", {**SMALL, "prompt_logprobs": 0, "stream": True})
    assert error["param"] == "prompt_logprobs"


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
    *events, last = server.events(
        "/v1/completions", {**body, "stream_options": {"include_usage": True}}
    )
    choices = joined(events)
    assert len(choices) == len(whole["choices"])
    for choice in whole["choices"]:
        assert choices[choice["index"]] == choice
    assert last["choices"] == [] and not any("usage" in event for event in events)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    # one chunk for each token, and the reason is in the last one's
    assert sum(len(event["choices"]) for event in events) == whole["usage"]["completion_tokens"]
    assert len({event["id"] for event in [*events, last]}) == 1
    assert {event["object"] for event in events} == {"text_completion"}


def test_the_usage_is_streamed_only_if_asked_for(server):
    body = {"prompt": PROMPT, "max_tokens": 3}
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        events = server.events("/v1/completions", {**body, "stream_options": options})
        assert all(event["choices"] and "usage" not in event for event in events)


@pytest.mark.parametrize("path", [*POSTS][:2])
@pytest.mark.parametrize("stream", [None, False])
def test_stream_options_without_a_stream(server, path, stream):
    body = {**POSTS[path], "stream": stream, "stream_options": {"include_usage": True}}
    assert server.refused(path, body)["param"] == "stream_options"


def test_an_id_out_of_the_vocabulary_is_refused_with_both_numbers(server):
    error = server.refused("/v1/completions", {**SMALL, "logit_bias": {"5": 1, "9999": -1}})
    assert "9999" in error["message"] and "1535" in error["message"]
    assert error["param"] == "logit_bias"


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
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert "".join(tokens).startswith(kept) and len(tokens) == len(offsets)
            streamed = joined(parrot.events("/v1/completions", body))[0]
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
            one["content"] += new["delta"].pop("content")
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


def test_many_answers_at_a_time_for_the_asynchronous_client(server, openai):
    async def ask(client, i):
        messages = [{"role": "user", "content": f"what is {i} + 30?"}]
        more = dict(model=MODEL, messages=messages, temperature=0, max_completion_tokens=24)
        whole = await client.chat.completions.create(**more)
        stream = await client.chat.completions.create(**more, stream=True)
        parts = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(parts) == whole.choices[0].message.content
        return whole.choices[0].message.content

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any") as client:
            return await asyncio.gather(*[ask(client, i) for i in range(10, 18)])

    answers = asyncio.run(ask_all())
    assert sum(str(i + 40) in answer for i, answer in enumerate(answers)) >= 6


def test_the_length_of_an_answer(server):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = server.chat("tell me a story", **{name: 5}, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"
    body = {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}
    error = server.refused("/v1/chat/completions", body)
    assert error["param"] == "max_completion_tokens"
    server.refused("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0})


def test_a_content_of_parts(parrot):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    answer = parrot.post("/v1/chat/completions", {"messages": messages})
    assert answer["choices"][0]["message"]["content"] == "one\ntwo"
    messages[0]["content"] = [{"type": "image_url", "image_url": {"url": "http://a"}}]
    error = parrot.refused("/v1/chat/completions", {"messages": messages})
    assert error["param"] == "messages" and "messages[0]" in error["message"]


@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_logprobs_of_a_chat(server, top):
    body = {**CHAT, "logprobs": True, "top_logprobs": top, "seed": 1, "max_tokens": 9}
    (choice,) = server.post("/v1/chat/completions", body)["choices"]
    content = choice["logprobs"]["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text.startswith(choice["message"]["content"])
    for entry in content:
        assert len(entry["top_logprobs"]) == (top or 0) and entry["logprob"] <= 0
        likeliest = [one["logprob"] for one in entry["top_logprobs"]]
        assert likeliest == sorted(likeliest, reverse=True)
    streamed = chat_joined(server.events("/v1/chat/completions", body))[0]
    assert [one["token"] for one in streamed["logprobs"]] == [one["token"] for one in content]
    logprobs = [one["logprob"] for one in content]  # those of a cached prompt differ by rounding
    assert [one["logprob"] for one in streamed["logprobs"]] == pytest.approx(logprobs, abs=1e-4)


def test_top_logprobs_go_with_logprobs(server):
    for logprobs in (None, False):
        body = {**CHAT, "logprobs": logprobs, "top_logprobs": 2}
        assert server.refused("/v1/chat/completions", body)["param"] == "top_logprobs"
    body = {**CHAT, "logprobs": False, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body)["choices"][0]["logprobs"] is None


def test_n_answers_are_streamed(server):
    body = {**CHAT, "n": 4, "seed": 1, "temperature": 2, "max_tokens": 12}
    whole = server.post("/v1/chat/completions", body)
    events = server.events("/v1/chat/completions", body)
    choices = chat_joined(events)
    for choice in whole["choices"]:
        streamed = choices[choice["index"]]
        assert streamed["content"] == choice["message"]["content"]
        assert streamed["finish_reason"] == choice["finish_reason"]
    assert sum(len(event["choices"]) for event in events) == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "name, good, bad",
    [
        (
            "response_format",
            [{"type": "text"}],  # others need an extra: test_formats.py
            [{"type": "json_schema"}, {"type": "json_object", "json_schema": {}}, {"type": "xml"}],
        ),
        (
            "tool_choice",
            ["none", "auto"],
            ["required", {"type": "function", "function": {"name": "f"}}],
        ),
        ("parallel_tool_calls", [True, False], [5]),
        ("modalities", [["text"]], [["text", "audio"]]),
        ("stream_options", [], [{"include": True}]),
        ("functions", [[]], [[{"name": "f"}]]),
        ("logprobs", [False], [1]),
        ("chat_template", [], ["{{ x }}"]),
        ("reasoning_effort", ["high", "none"], ["much"]),
        ("chat_template_kwargs", [{}, {"enable_thinking": True}], [5, {"conversation": 1}]),
    ],
)
def test_what_would_change_the_answer_is_done_or_refused(server, name, good, bad):
    body = POSTS["/v1/chat/completions"]
    for value in good:
        server.post("/v1/chat/completions", {**body, name: value})
    for value in bad:
        error = server.refused("/v1/chat/completions", {**body, name: value})
        assert name == "chat_template_kwargs" or error["param"] == name


def message_of(parrot, text: str, **body) -> dict:
    """What comes of a text that the model says: the same, streamed or not."""
    (choice,) = parrot.chat(text, **body)["choices"]
    message = choice["message"]
    assert message.pop("role") == "assistant"
    assert message.get("reasoning") == message.pop("reasoning_content", None)
    messages = [{"role": "user", "content": text}]
    streamed = chat_joined(parrot.events("/v1/chat/completions", {"messages": messages, **body}))[0]
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning"] == message.get("reasoning", "")
    for i, call in enumerate(message.get("tool_calls", [])):
        other = streamed["tool_calls"][i]
        assert other["index"] == i and other["function"] == call["function"]
        assert call.pop("id") != other["id"]
    assert len(streamed["tool_calls"]) == len(message.get("tool_calls", []))
    return message | {"finish_reason": choice["finish_reason"]}


TEXTS = {
    "<think>\nhm, 5.\n</think>\n\nIt is 5.": ("hm, 5.\n", "It is 5."),
    "<think></think>5": ("", "5"),
    "<think>for ever": ("for ever", ""),
    "\n<think>a</think>b": ("a", "b"),
    "no <think>tags</think>": ("", "no <think>tags</think>"),
    "<thin": ("", "<thin"),
    "</think>": ("", "</think>"),
    "<think>a</thin</think>b": ("a</thin", "b"),
    "<think>é☃</think>\U0001f600": ("é☃", "\U0001f600"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_reasoning_is_apart_wherever_its_tags_are_cut(parrot, text):
    reasoning, content = TEXTS[text]
    for seed in (None, *range(4)):
        message = message_of(parrot, text, seed=seed)
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)


def test_reasoning_that_the_template_opens_or_closes(parrot):
    message = message_of(parrot, "so</think>five", chat_template_kwargs={"opens_thinking": True})
    assert (message["reasoning"], message["content"]) == ("so", "five")
    for more in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = message_of(parrot, "five", **more)
        assert message["content"] == "five" and "reasoning" not in message
    message = message_of(parrot, "<think>a</think>five", enable_thinking=True)
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
        parts = [
            event["choices"][0]["delta"] for event in parrot.events("/v1/chat/completions", body)
        ]
    else:
        parts = [parrot.post("/v1/chat/completions", body)["choices"][0]["message"]]
    found = ("".join(part.get(name) or "" for part in parts) for name in ("reasoning", "content"))
    assert (*found,) == expected


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


def test_calls_of_tools(parrot):
    text = f"<think>I add.</think>Well:\n{CALL}\n{CALL}"
    for seed in (None, *range(4)):
        message = message_of(parrot, text, tools=TOOLS, seed=seed)
        assert message["reasoning"] == "I add." and message["content"] == "Well:\n"
        assert message["finish_reason"] == "tool_calls"
        functions = [call["function"] for call in message["tool_calls"]]
        assert functions == [{"name": "add", "arguments": '{"a": 1, "b": "é"}'}] * 2
        assert {call["type"] for call in message["tool_calls"]} == {"function"}
    message = message_of(parrot, CALL, tools=TOOLS)
    assert message["content"] is None
    message = message_of(parrot, text, tools=TOOLS, parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1 and message["finish_reason"] == "tool_calls"
    for more in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        message = message_of(parrot, CALL, **more)
        assert message["content"] == CALL and message["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno json\n</tool_call>\n\nafter",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>\n\n[]</tool_call>",
        "a\n<tool_call>\n",
        f"a{CALL[:-3]}",
        "a<tool_cal",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"b": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(parrot, text):
    for seed in (None, 1, 2):
        message = message_of(parrot, text, tools=TOOLS, seed=seed)
        assert message["content"] == text and message["finish_reason"] == "stop"


def test_the_official_client_calls_tools(parrot, openai):
    """And sends back what they have said."""
    with openai.OpenAI(base_url=parrot.url + "/v1", api_key="any") as client:
        messages: list = [{"role": "user", "content": CALL}]
        more = dict(model=MODEL, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
        message = client.chat.completions.create(messages=messages, **more).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": "é"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        messages += [message, result, {"role": "user", "content": "and now?"}]
        answer = client.chat.completions.create(messages=messages, **more)
        assert answer.choices[0].message.content == "and now?"
        with client.chat.completions.stream(
            messages=messages[:1], model=MODEL, tools=TOOLS
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.name == "add"
        assert final.choices[0].finish_reason == "tool_calls"


def test_a_final_message_is_continued(server):
    question = {"role": "user", "content": "what is 20 + 30?"}
    whole = server.post("/v1/chat/completions", {"messages": [question], "temperature": 0})
    text = whole["choices"][0]["message"]["content"]
    begun = {"role": "assistant", "content": text[:4]}
    body = {"messages": [question, begun], "temperature": 0, "continue_final_message": True}
    answer = server.post("/v1/chat/completions", {**body, "add_generation_prompt": False})
    assert answer["choices"][0]["message"]["content"] == text[4:]
    assert server.refused("/v1/chat/completions", body)["param"] == "continue_final_message"


# --- tokens, metrics ---


def test_text_becomes_tokens_and_text_again(server):
    for text in ("", PROMPT, "añb ☃ \U0001f600", "<|im_start|>user"):
        answer = server.post("/tokenize", {"prompt": text})
        assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 2048
        assert answer["tokens"] == server.llm.tokenizer.encode(text)
        assert server.post("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    count = server.post("/tokenize", CHAT)["count"]
    answer = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == count


def test_metrics_add_up(server):
    before = server.metrics()
    body = dict(prompt=PROMPT, max_tokens=4, ignore_eos=True)
    usages = [server.complete(**body, n=2)["usage"] for _ in range(3)]
    usages.append(server.chat("what is 2 + 2?")["usage"])
    *_, last = server.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    usages.append(last["usage"])
    after = server.metrics()
    new = {name: after[name] - before.get(name, 0) for name in after}
    assert new["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert new["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert new["prefix_cache_hits_total"] == cached
    assert new['request_success_total{finished_reason="length"}'] == 7
    assert new['request_success_total{finished_reason="stop"}'] == 1
    assert new["e2e_request_latency_seconds_count"] == 5
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert new["time_to_first_token_seconds_count"] == 8  # of each output
    assert new["inter_token_latency_seconds_count"] == num_tokens - 8
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[gauge] == 0


# --- what clients mean ---


@pytest.mark.parametrize("path", [*POSTS][:2])
def test_a_field_that_asks_for_what_is_done_anyway_is_accepted(server, path):
    more: dict = {
        "audio": None, "prediction": None, "verbosity": None, "reasoning_effort": None, "anything": None,
        "n": 1, "use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "functions": [],
        "documents": [], "vllm_xargs": {}, "user": "me", "metadata": {"a": "b"}, "store": True,
        "suffix": None,
    }  # fmt: skip
    if "chat" in path:
        more |= {
            "echo": False,
            "include_reasoning": True,
            "parallel_tool_calls": False,
            "tools": [],
        }
    server.post(path, {**POSTS[path], **more})
    streamed = dict.fromkeys(("continuous_usage_stats", "include_obfuscation"), False)
    server.events(path, {**POSTS[path], "stream_options": {"include_usage": None, **streamed}})
    wrong = {"use_beam_search": True, "length_penalty": 2, "functions": [{}], "audio": {}}
    wrong |= {"best_of": 2, "suffix": "x"}
    for name, value in wrong.items():
        error = server.refused(path, {**POSTS[path], name: value})
        assert error["param"] == name
    assert error["message"] == "suffix is not supported: leave it out"


@pytest.mark.parametrize(
    "tool", [{}, {"type": "function"}, {"type": "function", "function": {"name": ""}}, {"type": "function", "function": 5},
             {"type": "web"}, {"type": "function", "function": {"name": "f", "parameters": "x"}}]
)  # fmt: skip
def test_a_tool_has_a_name(server, tool):
    error = server.refused("/v1/chat/completions", {**CHAT, "tools": [TOOLS[0], tool]})
    assert error["param"] == "tools" and "tools[1]" in error["message"]


@pytest.mark.parametrize(
    "name, value, place",
    [
        ("prompt", [1.5], "1.5"),
        ("prompt", [[5], "a"], "prompt[1]"),
        ("logit_bias", {"x": 1, "5": 1, "y": 1}, "['x', 'y']"),
    ],
)
def test_what_is_wrong_within_a_value_is_said(server, name, value, place):
    error = server.refused("/v1/completions", {**SMALL, name: value})
    assert error["param"] == name and place in error["message"]


def test_logprobs_have_the_bytes_of_their_tokens(parrot):
    """Those of a part of a character, too: a client joins them."""
    text = "a\U0001f600é☃b"
    for seed in (None, 1, 2):
        answer = parrot.chat(text, logprobs=True, top_logprobs=0, seed=seed)
        *entries, _ = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) > len(text)
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()


def test_offsets_count_characters(server, parrot):
    """Also in a stream, which has one token at a time."""
    body = {"prompt": "a\U0001f600b", "logprobs": 1}
    echo = server.complete(**body, max_tokens=1, echo=True, temperature=0)["choices"][0]
    for choice in (echo, joined(parrot.events("/v1/completions", body))[0]):
        found = choice["logprobs"]
        emoji = [name for name in found["tokens"] if name.startswith("bytes:")]
        assert len(emoji) > 1 and "".join(emoji).replace("bytes:", "") == "\\xf0\\x9f\\x98\\x80"
        assert found["text_offset"] == [0] + [1] * len(emoji) + [2, 3]


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>', {"a": 1}),
        ('<tool_call>{"name":"f","arguments":null}</tool_call>', {}),
        ('<tool_call>{"name":"f"}</tool_call>', {}),
        (
            '<tool_call>{"name":"f","arguments":{"a":"</tool_call>"}}</tool_call>',
            {"a": "</tool_call>"},
        ),
        (
            '<tool_call>{"name":"f","arguments":{"a":"\\"</tool_call>"}}</tool_call>',
            {"a": '"</tool_call>'},
        ),
    ],
)
def test_a_call_loses_nothing(parrot, text, arguments):
    for seed in (None, 1, 2, 3):
        message = message_of(parrot, text, tools=TOOLS, seed=seed)
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == arguments
        assert not message["content"]


def test_token_ids_and_usage_of_each_event(server):
    body = dict(prompt=PROMPT, max_tokens=4, ignore_eos=True, return_token_ids=True, temperature=0)
    (whole,) = server.complete(**body)["choices"]
    assert whole["prompt_token_ids"] == server.post("/tokenize", {"prompt": PROMPT})["tokens"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = server.events("/v1/completions", {**body, "stream_options": options})
    parts = [event["choices"][0] for event in events]
    assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "prompt_token_ids" not in parts[1]
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4]
    assert events[-1]["usage"]["total_tokens"] == last["usage"]["total_tokens"]


# --- parsing ---

TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"x": 1}}',
)
pieces = st.sampled_from((*TAGS, "\n", "<", "think>", "</", "a", " ", "é")) | st.text(max_size=3)
cuts = st.lists(st.integers(0, 200), max_size=12)


def parsed(text: str, cuts: list[int], prompt: str | None, has_tools: bool) -> Parts:
    parser = Parser(prompt, has_tools)
    parts = Parts()
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for i, (begin, end) in enumerate(itertools.pairwise(ends), 2):
        new = parser.add(text[begin:end], is_last=i == len(ends))
        parts.reasoning += new.reasoning
        parts.content += new.content
        parts.tool_calls += new.tool_calls
    for call in parts.tool_calls:
        del call["id"]
    return parts


@settings(max_examples=150, deadline=None)
@given(
    st.lists(pieces, max_size=12).map("".join),
    cuts,
    st.sampled_from([None, "<think>\n"]),
    st.booleans(),
)
def test_a_text_in_pieces_has_the_same_parts(text, cuts, prompt, has_tools):
    whole = parsed(text, [], prompt, has_tools)
    assert parsed(text, cuts, prompt, has_tools) == whole
    assert parsed(text, [*range(len(text))], prompt, has_tools) == whole
    if "<think>" not in text and prompt is None and not whole.tool_calls:
        assert whole == Parts(content=text)
    kept = (whole.reasoning + whole.content).replace("\n", "")
    assert len(kept) <= len(text)
