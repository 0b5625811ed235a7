"""What an operator sees of a server: metrics, the log, names, keys, and what app.py says of the way of a request.

Run: pytest tests/server/test_operators.py [--slow]
"""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_tools import (
    CHATS,
    COMPLETIONS,
    Running,
    ServeProcess,
    busy,
    checked_error,
    new_parrot,
    request_bytes,
    wait_for,
)

from nanovllm.topics.server import app, cli, page

SMALL = {"prompt": "a", "max_tokens": 1}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def running():
    with Running(new_parrot(), served_model_name=["first", "second"]) as server:
        yield server


def change(server, function) -> dict[str, float]:
    """What a call adds to the metrics."""
    before = server.metrics()
    function()
    wait_for(lambda: not server.engine.open)
    after = server.metrics()
    return {name: value - before.get(name, 0) for name, value in after.items()}


@pytest.mark.parametrize("stream", [False, True])
def test_the_clock_starts_when_a_request_arrives(server, stream):
    """It waits for the tokenizer first."""

    def ask():
        body = {**SMALL, "stream": stream}
        with ThreadPoolExecutor(1) as pool:
            with busy(server):
                answer = pool.submit(server.http.post, COMPLETIONS, json=body)
                wait_for(lambda: server.engine.preparing.total())
                time.sleep(0.25)
            assert answer.result().status_code == 200

    new = change(server, ask)
    assert new["time_to_first_token_seconds_sum"] >= 0.25
    assert new["e2e_request_latency_seconds_sum"] >= 0.25


def test_what_was_aborted_or_failed_is_counted(server, monkeypatch):
    def aborted():
        launch = server.llm.runner.launch

        def slow(schedule):
            time.sleep(0.005)
            return launch(schedule)

        monkeypatch.setattr(server.llm.runner, "launch", slow)
        body = {"prompt": "a " * 900, "max_tokens": 1000, "n": 2, "stream": True}
        with server.connect() as sock:
            sock.sendall(request_bytes(COMPLETIONS, body))
            sock.recv(100)

    new = change(server, aborted)
    monkeypatch.undo()
    assert new['request_success_total{finished_reason="abort"}'] == 2

    def failed():
        tokens_of = server.llm.runner.tokens_of
        monkeypatch.setattr(server.llm.runner, "tokens_of", lambda request: tokens_of(request)[:1])
        server.refused(COMPLETIONS, {"prompt": "one two", "max_tokens": 9}, 500)
        monkeypatch.undo()

    new = change(server, failed)
    assert new['request_success_total{finished_reason="error"}'] == 1


def test_a_model_may_have_several_names(server):
    """All metrics have the first one."""
    models = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["first", "second"]
    assert server.http.get("/v1/models/second").json()["root"] == "first"
    for name, said in (("first", "first"), ("second", "second"), (None, "first")):
        assert server.complete(**SMALL, model=name)["model"] == said
    lines = server.http.get("/metrics").text.splitlines()
    ours = [line for line in lines if line.startswith("nanovllm:")]
    assert len(ours) > 30 and all('model_name="first"' in line for line in ours)


def test_keys_come_from_options_and_from_the_environment(monkeypatch):
    from nanovllm.topics.server import commands

    monkeypatch.setenv("NANOVLLM_API_KEY", "three  four")
    args = cli.new_parser().parse_args(["serve", "--api-key", "one", "--api-key", "two"])
    keys = commands.server_options(args).api_key
    assert keys == ["one", "two", "three", "four"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_times_and_ids_and_no_query(server, monkeypatch, path, stream):
    lines: list[str] = []
    monkeypatch.setattr(server.routes.options, "log_requests", True)
    monkeypatch.setattr(app.logger, "info", lambda text, *args: lines.append(text % args))
    bodies = {COMPLETIONS: SMALL, CHATS: {"messages": MESSAGES}}
    for own in ("", "mine"):
        headers = {"x-request-id": own} if own else {}
        body = {**bodies[path], "stream": stream}
        response = server.http.post(path + "?api_key=secret", json=body, headers=headers)
        name = response.headers["x-request-id"]
        wait_for(lambda: lines)
        assert re.fullmatch(
            rf"127.0.0.1:\d+ POST {path} 200 in \d+\.\d{{3}} s, id {name}", lines.pop()
        )
        assert name == (own or re.search(r'"id": "([^"]+)"', response.text)[1])
        assert re.search(rf'"id": "(\w+-)?{name}"', response.text)
    assert server.refused(path, {"request_id": 5, **bodies[path]})["param"] == "request_id"
    wait_for(lambda: lines)
    assert lines[0].endswith(" s, id -") and " 400 in " in lines[0]
    answer = server.http.post(path, json={**bodies[path], "request_id": "\n\u2603"})
    assert answer.headers["x-request-id"].endswith("%0A%E2%98%83")


@pytest.mark.parametrize(
    "line", ["GET http://127.0.0.1/health HTTP/1.1\r\nHost: a", "GET /health HTTP/1.0"]
)
def test_other_forms_of_a_request_line(server, monkeypatch, line):
    """A whole URL, and a health check without a Host."""
    monkeypatch.setattr(server.routes, "hosts", {"a"})
    with server.connect() as sock:
        sock.sendall(line.encode() + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_so_many_may_watch(server, monkeypatch):
    monkeypatch.setattr(page, "MOST_WATCHERS", 2)
    with server.http.stream("GET", "/live"), server.http.stream("GET", "/live"):
        wait_for(lambda: len(server.routes.live.readers) == 2)
        checked_error(server.http.get("/live"), 429)
    wait_for(lambda: not server.routes.live.readers)
    with server.http.stream("GET", "/live") as again:
        assert again.status_code == 200


@pytest.mark.slow
def test_a_server_that_is_open_to_all_says_so():
    with ServeProcess("--host", "0.0.0.0") as server:
        server.http.get("/version")
        server.end(signal.SIGTERM)
        assert "may use it" in server.log
        assert re.search(r"^\d{4}-\d\d-\d\d \d\d:.* GET /version 200 in ", server.log, re.MULTILINE)
