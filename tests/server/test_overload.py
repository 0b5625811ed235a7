"""One client cannot stop the others: what a body, a header and a connection may be, and what waits meanwhile.

Run: pytest tests/server/test_overload.py
"""

import json

import pytest
from server_tools import Running, busy, checked_error, new_parrot, request_bytes, wait_for

from nanovllm.server import connections, gate
from nanovllm.server.settings import ServerOptions

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SMALL = {"prompt": "a", "max_tokens": 1}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def running():
    with Running(new_parrot()) as server:
        yield server


# --- texts ---


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
def test_a_text_that_cannot_fit_is_refused_and_not_tokenized(server, monkeypatch, path):
    tokenizer = server.engine.long.inputs.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it is tokenized"))
    text = "the quick brown fox " * 6_000
    body = (
        {"messages": [{"role": "user", "content": text}]}
        if path != COMPLETIONS
        else {"prompt": text}
    )
    error = server.refused(path, body)
    assert "characters" in error["message"] and "max_model_len=2048" in error["message"]
    assert (error["code"], error["param"]) == (
        "context_length_exceeded",
        None if path == CHATS else "prompt",
    )


def test_a_text_of_too_many_tokens_says_so_to_programs(server):
    error = server.refused(COMPLETIONS, {"prompt": "a b " * 2_000})
    assert error["code"] == "context_length_exceeded" and "2048" in error["message"]
    error = server.refused(COMPLETIONS, {"prompt": [5] * 2_048})
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"


def test_a_short_text_does_not_wait_for_a_long_one(server):
    with busy(server, "long"):
        server.complete(**SMALL)
        server.chat("hello", max_tokens=1)


def test_texts_that_are_tokenized_count_as_waiting(server, pool, monkeypatch):
    monkeypatch.setattr(server.engine, "max_waiting", 1)
    with busy(server, "short"):
        answers = [pool.submit(server.http.post, COMPLETIONS, json=SMALL) for _ in range(2)]
        wait_for(lambda: server.engine.num_preparing == 2)
        assert server.metrics()["num_requests_waiting"] == 2
        for path, body in ((COMPLETIONS, SMALL), ("/tokenize", {"prompt": "a"})):
            assert "2 requests wait" in server.refused(path, body, 429)["message"]
    assert {answer.result().status_code for answer in answers} <= {200, 429}
    assert server.metrics()["num_requests_waiting"] == 0


def test_a_client_that_leaves_is_not_tokenized(server, monkeypatch):
    monkeypatch.setattr(server.engine, "max_waiting", 1)
    texts = []
    tokenizer = server.engine.short.inputs.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **more: (texts.append(text), encode(text, **more))[1]
    )
    with busy(server, "short"):
        for _ in range(20):  # more than may wait
            with server.connect() as sock:
                sock.sendall(request_bytes(COMPLETIONS, {"prompt": "gone"}))
                wait_for(lambda: server.engine.num_preparing == 1)
            wait_for(lambda: server.engine.num_preparing == 0)
    server.complete(**SMALL)
    assert texts == ["a"]


# --- bodies ---


def test_the_largest_body_follows_from_the_model():
    def most(max_model_len: int, **options) -> int:
        return ServerOptions(served_model_name=["a"], **options).most_bytes(max_model_len)

    assert most(2_048) == 2**18 and most(40_960) == 32 * 40_960 and most(10**7) == 2**22
    assert most(2_048, max_body_bytes=5) == 5


def test_a_body_that_is_too_large_is_not_read_to_its_end(server):
    with server.connect() as sock:
        head = "\r\n".join(
            (
                f"POST {COMPLETIONS} HTTP/1.1",
                "Host: a",
                "Content-Type: application/json",
                "Content-Length: 900000",
            )
        )
        sock.sendall(head.encode() + b"\r\n\r\n" + b"x" * (2**18 + 1))
        assert sock.recv(100).startswith(b"HTTP/1.1 413")


TOO_MANY = {
    "messages": (CHATS, {"messages": [{"role": "user", "content": "a"}] * 4_097}),
    "tools": (CHATS, {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 129}),
    "stop": (COMPLETIONS, {**SMALL, "stop": ["a"] * 65}),
    "stop_token_ids": (COMPLETIONS, {**SMALL, "stop_token_ids": [5] * 1_025}),
    "logit_bias": (COMPLETIONS, {**SMALL, "logit_bias": {str(i): 1 for i in range(1_025)}}),
    "prompt": (COMPLETIONS, {**SMALL, "prompt": ["a"] * 1_025}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_list_has_a_limit(server, name):
    path, body = TOO_MANY[name]
    error = server.refused(path, body)
    assert error["param"] == name and any(digit in error["message"] for digit in "123456789")


@pytest.mark.parametrize("stop", ["a" * 4_097, ["a" * 100] * 41])
def test_stop_strings_have_a_limit_in_all(server, stop):
    """Each is looked for after each token, in the thread that computes them for all."""
    assert server.refused(COMPLETIONS, {**SMALL, "stop": stop})["param"] == "stop"
    server.complete(**SMALL, stop=["a" * 64] * 64)


# --- connections ---


def test_headers_without_an_end_end_the_connection(server):
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        with pytest.raises(OSError):  # it is closed while we write
            for _ in range(1_000):
                sock.sendall(b"a" * 2**16)
    assert server.http.get("/health").status_code == 200


def test_a_long_body_is_no_header(server):
    data = json.dumps({"prompt": "a b" * 50_000}).encode()
    for _ in range(3):  # in the same connection
        checked_error(server.http.post(COMPLETIONS, content=data, headers=JSON), 400)


@pytest.mark.parametrize("data", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: a\r\n"])
def test_a_silent_connection_ends(server, monkeypatch, data):
    monkeypatch.setattr(connections, "SECONDS", 0.1)
    with server.connect() as sock:
        sock.sendall(data)
        assert sock.recv(100) == b""


def test_a_silent_second_request_ends_too(server, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 0.1)
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(1_000).startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /hea")
        assert sock.recv(100) == b""


def test_a_body_that_does_not_come(server, monkeypatch):
    monkeypatch.setattr(gate, "SECONDS", 0.1)
    with server.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, SMALL)[:-5])
        assert sock.recv(100).startswith(b"HTTP/1.1 408")
