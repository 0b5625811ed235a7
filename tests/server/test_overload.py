"""One client cannot stop the others: what a body, a header and a connection may be, and what waits meanwhile.

Run: pytest tests/server/test_overload.py
"""

import json
from threading import Event

import pytest
from server_tools import (
    Process,
    Running,
    busy,
    checked_error,
    new_parrot,
    request_bytes,
    wait_for,
)

from nanovllm import LLM
from nanovllm.server import app, connections, gate, page
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
    lane = server.engine.told if path == "/tokenize" else server.engine.long
    tokenizer = lane.inputs.tokenizer
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


def test_a_client_that_leaves_ends_the_work_between_two_prompts(server, monkeypatch):
    texts = []
    tokenizer = server.engine.short.inputs.tokenizer
    encode = tokenizer.encode
    may_go_on = Event()

    def slow(text, **more):
        texts.append(text)
        assert may_go_on.wait(60)
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", slow)
    with server.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, {"prompt": [f"gone {i}" for i in range(1000)]}))
        wait_for(lambda: texts)
    wait_for(lambda: server.engine.num_preparing == 0)
    may_go_on.set()
    server.complete(**SMALL)
    assert texts == ["gone 0", "a"]


def test_a_short_call_goes_between_the_prompts_of_a_long_one(server, pool, monkeypatch):
    monkeypatch.setattr(server.engine, "max_waiting", 1000)
    texts = []
    tokenizer = server.engine.short.inputs.tokenizer
    encode = tokenizer.encode

    def noted(text, **more):
        texts.append(text)
        wait_for(lambda: len(texts) < 2 or server.engine.num_preparing == 2 or "a" in texts)
        return encode(text, **more)

    monkeypatch.setattr(tokenizer, "encode", noted)
    many = pool.submit(server.complete, prompt=["0"] * 20, max_tokens=1)
    wait_for(lambda: texts)
    server.complete(**SMALL)
    many.result()
    assert texts.index("a") < 10 and len(texts) == 21


FORM = {**SMALL, "structured_outputs": {"choice": ["a"]}}


@pytest.mark.parametrize("lane, path, body", [
    ("forms", COMPLETIONS, FORM),
    ("forms", CHATS, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "text"}}),
    ("told", "/tokenize", {"prompt": "a"}),
])  # fmt: skip
def test_what_takes_long_has_a_lane_of_its_own(server, pool, lane, path, body):
    with busy(server, lane):
        waiting = pool.submit(server.http.post, path, json=body)
        wait_for(lambda: server.engine.num_preparing == 1)
        server.complete(**SMALL)
        server.chat("hello", max_tokens=1)
        assert not waiting.done()
    assert waiting.result().status_code == 200


# --- answers ---


@pytest.fixture(scope="module")
def scored():
    """A model that gives log-probabilities."""
    with Running(LLM(num_blocks=2000, max_num_seqs=32)) as server:
        yield server
        server.check_idle()


SCORED = {"prompt": ["a b c", "d"], "n": 3, "max_tokens": 4, "logprobs": 2, "echo": True, "seed": 1}


def without_id(answer: dict) -> dict:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 1, "return_token_ids": True}])
def test_a_large_answer_is_written_in_a_thread_and_is_the_same(scored, pool, monkeypatch, more):
    server = scored
    expected = server.complete(**SCORED, **more)
    monkeypatch.setattr(app, "FEW", 0)
    with busy(server, "writing"):
        waiting = pool.submit(server.complete, **SCORED, **more)
        wait_for(lambda: server.engine.writing.jobs.qsize() == 1)
        server.complete(**SMALL)
        assert not waiting.done()
    assert without_id(waiting.result()) == without_id(expected)


@pytest.mark.parametrize("more, num_entries", [
    ({"prompt_logprobs": 20}, 16 * 1000 * 21),
    ({"return_token_ids": True}, 16 * 1001),
    ({"echo": True, "logprobs": 3}, 16 * (1000 * 4 + 4)),
    ({"logprobs": 4}, 16 * 5),
])  # fmt: skip
def test_an_answer_that_may_be_too_large_is_refused_before_it_begins(
    scored, monkeypatch, more, num_entries
):
    server = scored
    body = {"prompt": [5] * 1000, "n": 16, "max_tokens": 1, **more}
    monkeypatch.setattr(app, "MOST_ENTRIES", num_entries - 1)
    message = server.refused(COMPLETIONS, body)["message"]
    assert f"{num_entries:,}" in message and f"{num_entries - 1:,}" in message
    monkeypatch.setattr(app, "MOST_ENTRIES", num_entries)
    server.complete(**body)


def test_answers_that_are_not_sent_yet_are_bounded_together(scored, pool, monkeypatch):
    server = scored
    body = {**SMALL, "logprobs": 3}
    monkeypatch.setattr(app, "FEW", 0)
    monkeypatch.setattr(app, "MOST_UNSENT", 7)  # room for one
    with busy(server, "writing"):
        waiting = pool.submit(server.complete, **body)
        wait_for(lambda: server.engine.writing.jobs.qsize() == 1)
        assert "not sent yet" in server.refused(COMPLETIONS, body, 429)["message"]
        server.complete(**SMALL)
    waiting.result()
    wait_for(lambda: len(server.uvicorn.server.unsent) == 0)
    server.complete(**body)


def test_a_call_may_have_half_of_the_seats(server):
    server.complete(**SMALL, n=16)
    error = server.refused(COMPLETIONS, {**SMALL, "n": 17})
    assert error["param"] == "n" and "at most 16, half of max_num_seqs" in error["message"]


def test_so_many_may_watch(server, monkeypatch):
    monkeypatch.setattr(page, "MOST_WATCHERS", 2)
    with server.http.stream("GET", "/live"), server.http.stream("GET", "/live"):
        wait_for(lambda: len(server.uvicorn.server.live.readers) == 2)
        checked_error(server.http.get("/live"), 429)
    wait_for(lambda: not server.uvicorn.server.live.readers)
    with server.http.stream("GET", "/live") as again:
        assert again.status_code == 200


@pytest.mark.slow
def test_a_log_that_is_not_read_stops_nothing():
    with Process() as server:
        for _ in range(1200):  # lines of 300 characters, and a pipe holds 64 KiB
            assert server.http.get("/" + "a" * 300).status_code == 404
        assert server.http.post(COMPLETIONS, json=SMALL).status_code == 200
        server.process.terminate()
        assert server.end() == 0
    assert server.log.count(" 404:") == 1200


@pytest.mark.slow
def test_a_server_ends_if_its_log_is_never_read():
    with Process() as server:
        for _ in range(400):
            server.http.get("/" + "a" * 300)
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0


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
    "bad_words": (COMPLETIONS, {**SMALL, "bad_words": ["a"] * 257}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_list_has_a_limit(server, name):
    path, body = TOO_MANY[name]
    error = server.refused(path, body)
    assert error["param"] == name and any(digit in error["message"] for digit in "123456789")


@pytest.mark.parametrize("name, texts", [
    ("stop", "a" * 4_097), ("stop", ["a" * 100] * 41), ("bad_words", ["a" * 4_097]), ("bad_words", ["b" * 20] * 205),
])  # fmt: skip
def test_strings_have_a_limit_in_all(server, name, texts):
    """Each is looked for after each token, in the thread that computes them for all."""
    assert server.refused(COMPLETIONS, {**SMALL, name: texts})["param"] == name
    server.complete(**SMALL, **{name: ["a" * 64] * 64})


# --- connections ---


def test_headers_without_an_end_end_the_connection(server):
    with server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        with pytest.raises(OSError):  # it is closed while we write
            for _ in range(1_000):
                sock.sendall(b"a" * 2**16)
    assert server.http.get("/health").status_code == 200


def test_headers_behind_a_body_are_headers(server):
    head = request_bytes(COMPLETIONS, {}, "Transfer-Encoding: chunked").replace(
        b"Content-Length: 2\r\n", b""
    )
    with server.connect() as sock:
        sock.sendall(head.removesuffix(b"{}") + b"2\r\n{}\r\n0\r\n")
        with pytest.raises(OSError):  # it is closed while we write
            for i in range(1_000):
                sock.sendall(b"x%d: " % i + b"a" * 2**14 + b"\r\n")
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
