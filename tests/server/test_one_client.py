"""What one client can take: memory and time before its key is checked, the thread that tokenizes, the engine, and
memory for what it does not read. No test measures time.

The model is the fake one of fake_model.py.

Run: pytest tests/server/test_one_client.py [-k head]
"""

import json
import re
import socket
from contextlib import suppress

import pytest
from server_tools import (
    CHATS,
    COMPLETIONS,
    Running,
    busy,
    checked_error,
    new_paced,
    read_metrics,
    read_until,
    request_bytes,
    wait_for,
)

from nanovllm.topics.fairness.shares import FairShares
from nanovllm.topics.server import async_llm, serve

SMALL = {"prompt": "a", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
MOST_LEN = 512


@pytest.fixture(scope="module")
def running():
    with Running(new_paced(), max_waiting=64) as server:
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        yield server


# --- before the key is checked ---

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = b"".join(b"x%d: y\r\n" % i for i in range(6000))
ENDLESS = {
    "headers": (GET, MANY),
    "one header": (GET + b"x: ", b"y" * 65536),
    "a URL": (b"GET /", b"y" * 65536),
    "a method": (b"", b"y" * 65536),
    "trailers": (CHUNKED + b"0\r\n", MANY),
    "trailers of a GET": (GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", MANY),
    "one trailer": (CHUNKED + b"0\r\nx: ", b"y" * 65536),
    "the extension of a chunk": (CHUNKED + b"1;x=", b"y" * 65536),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_head_without_end_is_refused(name):
    """The sockets themselves hold some megabytes."""
    begin, part = ENDLESS[name]
    with (
        Running(new_paced(), api_key=["sesame"]) as server,
        server.connect() as sock,
    ):
        num_sent = 0
        with pytest.raises(OSError):
            sock.sendall(begin)
            while num_sent < 64 * 2**20:
                sock.sendall(part)
                num_sent += len(part)
        wait_for(lambda: not server.uvicorn.server_state.connections)
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "more, status", [(b"x: " + b"y" * 12_000, 200), (b"Host: evil.example", 400)]
)
def test_a_long_head_is_allowed_and_a_second_host_is_not(server, more, status):
    with server.connect() as sock:
        sock.sendall(GET + more + b"\r\n\r\n")
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("num_chunks", [1, 40])
def test_a_body_may_have_many_lines(server, num_chunks):
    body = {**SMALL, "metadata": {str(i): i for i in range(1500)}}
    lines = json.dumps(body, indent=2).replace("\n", "\r\n").encode()
    size = -(-len(lines) // num_chunks)
    parts = (lines[i : i + size] for i in range(0, len(lines), size))
    headers = {"content-type": "application/json"}
    for content in (parts, lines):
        assert server.http.post(COMPLETIONS, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("offer", ["h2c", "websocket", "anything"])
def test_an_offer_of_another_protocol_is_ignored(server, offer):
    offers = (
        f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}",
        "HTTP2-Settings: AAEAAEAA",
    )
    with server.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, SMALL, *offers))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost:"]
)
def test_another_name_of_this_machine_is_refused_with_a_hint(server, monkeypatch, host):
    monkeypatch.setattr(server.routes, "hosts", {"localhost", "127.0.0.1", "[::1]"})
    for path in ("/", "/version", "/health"):
        response = server.http.get(path, headers={"host": host})
        if host.startswith("localhost"):
            assert response.status_code == 200
        else:
            assert "--api-key" in checked_error(response, 400)["message"]
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:80"):
        assert server.http.get("/version", headers={"host": host}).status_code == 200


def test_the_schema_is_made_once(server, monkeypatch):
    first = server.http.get("/openapi.json")
    app = server.uvicorn.config.app
    monkeypatch.setattr(app, "openapi", lambda: pytest.fail("it is made again"))
    assert server.http.get("/openapi.json").content == first.content


# --- bodies ---

FLOOD = [{}] * 100_000
DEEP = json.loads("[" * 300 + "]" * 300)
MESSAGE = CHAT["messages"][0]
TOOL = {"type": "function", "function": {"name": "f"}}
FLOODS = {
    "a field of a message": (CHATS, {"messages": [{**MESSAGE, "x": FLOOD}]}, "messages"),
    "a field of lists": (CHATS, {"messages": [{**MESSAGE, "x": [[]] * 100_000}]}, "messages"),
    "many fields": (CHATS, {"messages": [MESSAGE | {f"k{i}": 1 for i in range(60_000)}]}, "messages"),
    "numbers": (CHATS, {"messages": [{**MESSAGE, "x": [1] * 100_000}]}, "messages"),
    "parts": (CHATS, {"messages": [{**MESSAGE, "content": FLOOD}]}, "messages"),
    "tool calls": (CHATS, {"messages": [{"role": "assistant", "tool_calls": FLOOD}]}, "messages"),
    "a tool": (CHATS, {**CHAT, "tools": [{**TOOL, "function": {"name": "f", "x": FLOOD}}]}, "tools"),
    "kwargs": (CHATS, {**CHAT, "chat_template_kwargs": {"x": FLOOD}}, "chat_template_kwargs"),
    "metadata": (CHATS, {**CHAT, "metadata": {"x": FLOOD}}, "metadata"),
    "a chat to tokenize": ("/tokenize", {"messages": [{**MESSAGE, "x": FLOOD}]}, "messages"),
    "ids": ("/detokenize", {"tokens": [5] * 100_000}, "tokens"),
    "depth": (CHATS, {**CHAT, "metadata": {"a": DEEP}}, "metadata"),
    "depth of a message": (CHATS, {"messages": [{**MESSAGE, "x": DEEP}]}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FLOODS)
def test_a_body_has_so_many_values(server, monkeypatch, name, stream):
    """Nothing walks through more of them."""
    monkeypatch.setattr(
        server.routes.tokenizing, "submit", lambda *_: pytest.fail("it is prepared")
    )
    path, body, field = FLOODS[name]
    more = {} if path.endswith("tokenize") else {"stream": stream}
    error = server.refused(path, {**body, **more})
    assert error["param"] == field and re.search(r"\d", error["message"])


@pytest.mark.parametrize("path, body", [(COMPLETIONS, SMALL), (CHATS, CHAT)])
def test_one_of_many_unknown_fields_is_named(server, path, body):
    error = server.refused(path, body | {f"k{i}": i for i in range(50_000)})
    assert "k0 is not supported" in error["message"] and "49,999 more" in error["message"]
    assert error["param"] == "k0"
    within = {**SMALL, "stream": True, "stream_options": {f"k{i}": i for i in range(100)}}
    error = server.refused(COMPLETIONS, within)
    assert error["param"] == "stream_options" and "99 more" in error["message"]


PARAMETERS = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(30)},
}
ALLOWED = {
    "a long chat": (CHATS, {"messages": [MESSAGE] * 80, "max_tokens": 1}),
    "messages of parts": (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20}] * 3}),
    "a long prompt of ids": (COMPLETIONS, {"prompt": [5] * (MOST_LEN - 1), "max_tokens": 1}),
    "64 long prompts of ids": (COMPLETIONS, {"prompt": [[5] * (MOST_LEN - 1)] * 64, "max_tokens": 1}),
    "1,024 biases": (COMPLETIONS, {**SMALL, "logit_bias": {str(i): 1 for i in range(1024)}}),
    "64 tools": (CHATS, {**CHAT, "tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": PARAMETERS}}
                                           for i in range(64)], "tool_choice": "none"}),
    "a flood that is text": (CHATS, {"messages": [{"role": "tool", "content": "{}, []" * 80}], "max_tokens": 1}),
    "metadata": (CHATS, {**CHAT, "metadata": {str(i): "a" for i in range(5000)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_model_can_take_is_allowed(server, name):
    server.post(*ALLOWED[name])


HALF = "\ud800"
UNSENDABLE = {
    "metadata": (CHATS, {**CHAT, "metadata": {"a": HALF}}, "metadata"),
    "a name in metadata": (CHATS, {**CHAT, "metadata": {"a": {HALF: 1}}}, "metadata"),
    "user": (CHATS, {**CHAT, "user": "a" + HALF}, "user"),
    "a tool's description": (CHATS, {**CHAT, "tools": [{**TOOL, "description": HALF}]}, "tools"),
    "a prompt": (COMPLETIONS, {"prompt": HALF}, "prompt"),
    "a prompt alone": (COMPLETIONS, {"prompt": HALF, "add_special_tokens": False}, "prompt"),
    "a prompt among others": (COMPLETIONS, {"prompt": ["a", "\udc00"]}, "prompt"),
    "a text to tokenize": ("/tokenize", {"prompt": HALF}, "prompt"),
    "a message": (CHATS, {"messages": [{"role": "user", "content": HALF}]}, "messages"),
    "a stop string": (COMPLETIONS, {**SMALL, "stop": HALF}, "stop"),
    "a model": (COMPLETIONS, {**SMALL, "model": HALF}, "model"),
    "a salt": (COMPLETIONS, {**SMALL, "cache_salt": HALF}, "cache_salt"),
    "a name": (COMPLETIONS, {**SMALL, HALF: 1}, "\\ud800"),
    "NaN": (CHATS, {**CHAT, "metadata": {"a": float("nan")}}, "metadata"),
    "Infinity": (CHATS, {**CHAT, "metadata": {"a": [float("-inf")]}}, "metadata"),
    "a temperature": (COMPLETIONS, {**SMALL, "temperature": float("inf")}, "temperature"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_an_answer_could_not_repeat_is_refused(server, name, stream):
    path, body, field = UNSENDABLE[name]
    more = {} if path == "/tokenize" else {"stream": stream}
    content = json.dumps({**body, **more})
    response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert checked_error(response, 400)["param"] == field
    huge = content.replace("NaN", "1e999").replace("Infinity", "1e999")
    response = server.http.post(path, content=huge, headers={"content-type": "application/json"})
    assert checked_error(response, 400)["param"] == field


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body", [(COMPLETIONS, {"prompt": [[5] * 9] * 3}), (CHATS, CHAT)])
def test_a_body_is_let_go_while_its_answer_comes(server, pool, monkeypatch, path, body, stream):
    bodies = []
    prepared = server.routes.prepared

    def seen(function, body, call):
        bodies.append((body, call))
        return prepared(function, body, call)

    monkeypatch.setattr(server.routes, "prepared", seen)
    server.llm.runner.is_paced = True
    answer = pool.submit(server.http.post, path, json={**body, "stream": stream})
    wait_for(lambda: server.llm.scheduler.running)
    ((made, call),) = bodies
    assert vars(made) == {} and call._json == {}
    server.llm.runner.free()
    assert answer.result().status_code == 200


# --- turns ---


@pytest.mark.parametrize("by", ["key", "address"])
def test_clients_take_turns_in_the_thread_that_tokenizes(pool, monkeypatch, by):
    """Of eight calls of one client and one of another that come while the thread is busy, the other one is second."""
    keys = ["one", "two"] if by == "key" else []
    with Running(new_paced(), api_key=keys) as server:
        order = []
        tokenizer = server.routes.inputs.tokenizer
        encode = type(tokenizer).encode

        def seen(text, **options):
            order.append(text)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(tokenizer, "encode", seen)

        def call(name: str, client: int):
            address = f"127.0.0.{client}" if by == "address" else "127.0.0.1"
            sock = socket.create_connection(server.address, 60, (address, 0))
            key = [f"Authorization: Bearer {keys[client - 1]}"] if keys else []
            num_before = server.engine.preparing.total()
            sock.sendall(request_bytes(COMPLETIONS, {"prompt": name, "max_tokens": 1}, *key))
            wait_for(lambda: server.engine.preparing.total() > num_before)
            return sock

        with busy(server):
            socks = [call(f"greedy {i}", 1) for i in range(8)]
            socks[3].close()  # a call that has left takes no turn
            wait_for(lambda: server.engine.preparing.total() == 7)
            socks.append(call("polite", 2))
        for sock in socks:
            with suppress(OSError):
                assert sock.recv(100).startswith(b"HTTP/1.1 200")
                sock.close()
        assert order.index("polite") == 1 and len(order) == 8 and "greedy 3" not in order
        assert not server.routes.turns


# --- the engine, and what is not read ---


@pytest.mark.parametrize("stream", [False, True])
def test_each_output_counts(server, pool, stream):
    """64 may wait."""
    body = {"prompt": ["a"] * 64, "n": 8, "max_tokens": 1, "stream": stream}
    error = server.refused(COMPLETIONS, body)
    assert error["param"] == "n" and "512 outputs" in error["message"] and "256" in error["message"]
    server.llm.runner.is_paced = True
    before = [pool.submit(server.complete, **SMALL, n=8) for _ in range(2)]
    wait_for(lambda: len(server.engine.open) == 2 and server.llm.scheduler.running)
    assert server.engine.num_waiting == 16 - 8 * len(server.llm.scheduler.running)
    error = server.refused(COMPLETIONS, {**body, "prompt": ["a"] * 8}, 429)
    assert "64 may" in error["message"]
    server.llm.runner.free()
    assert all(len(answer.result()["choices"]) == 8 for answer in before)


def test_one_call_does_not_keep_the_others_out(pool):
    """Of eight seats and four waiting outputs, it has all until another client comes."""
    keys = {name: {"headers": {"authorization": f"Bearer {name}"}} for name in ("greedy", "polite")}
    llm = new_paced(scheduler_cls=FairShares)
    with Running(llm, api_key=[*keys], max_waiting=4) as server:
        llm.runner.is_paced = True
        body = {"prompt": ["a"] * 6, "n": 2, "max_tokens": 80, "ignore_eos": True}
        greedy = pool.submit(server.post, COMPLETIONS, body, **keys["greedy"])
        wait_for(lambda: len(llm.scheduler.running) == 4)
        llm.runner.step(2)
        server.refused(COMPLETIONS, SMALL, 429, **keys["greedy"])
        metrics = pool.submit(server.http.get, "/metrics", **keys["greedy"])
        while not metrics.done():  # between two steps
            llm.runner.step()
        gauges = read_metrics(metrics.result().text)
        assert (gauges["num_requests_running"], gauges["num_requests_waiting"]) == (8, 4)
        polite = pool.submit(server.post, COMPLETIONS, SMALL, **keys["polite"])
        wait_for(lambda: len(server.engine.open) == 7)
        llm.runner.step(3)
        assert polite.result()["choices"][0]["finish_reason"] == "length"
        assert len(server.engine.open) == 6
        llm.runner.free()
        assert len(greedy.result()["choices"]) == 12


@pytest.mark.parametrize("path, body", [(COMPLETIONS, {**SMALL, "n": 3}), (CHATS, CHAT)])
def test_a_stream_that_is_not_read_has_a_limit_of_memory(server, monkeypatch, path, body):
    monkeypatch.setattr(async_llm, "MOST_UNREAD", 20)
    monkeypatch.setattr(server.llm.runner, "vocab_size", 100)  # without the token that ends a text
    with server.connect(receive_buffer=2048) as sock:
        sock.sendall(request_bytes(path, {**body, "max_tokens": 500, "stream": True}))
        wait_for(lambda: server.llm.runner.num_begun)
        wait_for(lambda: not server.engine.open and not server.llm.requests)
        assert b'"length"' not in read_until(sock, b"does not read")


def test_a_stream_that_is_not_read_is_closed(server, monkeypatch):
    monkeypatch.setattr(serve, "LONGEST_IDLE", 0.3)
    body = {"prompt": ["a"] * 8, "max_tokens": 500, "stream": True}
    with server.connect(receive_buffer=2048) as sock:
        sock.sendall(request_bytes(COMPLETIONS, body))
        wait_for(lambda: server.llm.runner.num_begun)
        wait_for(lambda: not server.uvicorn.server_state.connections)
        wait_for(lambda: not server.engine.open)
