"""What an operator sees of a server: metrics, a log line per request, the status at the end, warnings.

Run: pytest tests/server/test_operators.py [--slow]
"""

import logging
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
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

from nanovllm.scheduler import Scheduler
from nanovllm.server import cli
from nanovllm.server.serve import bind

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SMALL = {"prompt": "a", "max_tokens": 1}


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


# --- metrics ---


@pytest.mark.parametrize("stream", [False, True])
def test_the_clock_begins_when_a_request_arrives(server, stream):
    """It waits for the tokenizer first."""

    def ask():
        with ThreadPoolExecutor(1) as pool:
            with busy(server, "short"):
                answer = pool.submit(
                    server.http.post, COMPLETIONS, json={**SMALL, "stream": stream}
                )
                wait_for(lambda: server.engine.num_preparing)
                time.sleep(0.25)
            assert answer.result().status_code == 200

    new = change(server, ask)
    assert new["time_to_first_token_seconds_sum"] >= 0.25
    assert new["e2e_request_latency_seconds_sum"] >= 0.25


def test_tokens_are_counted_streamed_or_not(server):
    body = {"prompt": "one two three four", "max_tokens": 4, "stop_token_ids": [], "seed": 3}
    whole = change(server, lambda: server.complete(**body))
    streamed = change(server, lambda: server.events(COMPLETIONS, body))
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        name += "_seconds_count"
        assert whole[name] == streamed[name] == (3 if name.startswith("inter") else 1)


def test_all_metrics_have_the_name_of_the_model(server):
    server.complete(**SMALL)
    lines = server.http.get("/metrics").text.splitlines()
    ours = [line for line in lines if line.startswith("nanovllm:") and "http_responses" not in line]
    assert len(ours) > 30 and all('model_name="first"' in line for line in ours)


def test_what_was_refused_aborted_or_failed_is_counted(server, monkeypatch):
    def refused():
        server.refused(COMPLETIONS, {"prompt": ""})
        server.refused("/nowhere", {}, 404)
        server.refused("/elsewhere", {}, 404)
        monkeypatch.setattr(server.engine, "max_waiting", -1)
        server.refused(COMPLETIONS, SMALL, 429)
        monkeypatch.undo()

    new = change(server, refused)
    assert new['http_responses_total{path="/v1/completions",status="400"}'] == 1
    assert new['http_responses_total{path="/v1/completions",status="429"}'] == 1
    assert new['http_responses_total{path="other",status="404"}'] == 2

    def aborted():
        launch = server.llm.runner.launch

        def slow(schedule):
            time.sleep(0.005)
            return launch(schedule)

        monkeypatch.setattr(server.llm.runner, "launch", slow)
        with server.connect() as sock:
            text = "a " * 900  # the parrot says all of it
            sock.sendall(
                request_bytes(
                    COMPLETIONS, {"prompt": text, "max_tokens": 1000, "n": 2, "stream": True}
                )
            )
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


# --- the log ---


def lines_of(caplog, *ids: str) -> list[str]:
    """The log's lines for these requests: those of earlier tests may still come."""
    records = [record for record in caplog.records if record.name == "uvicorn.error"]
    lines = dict.fromkeys(record.getMessage() for record in records)
    return [line for i in ids for line in lines if line.endswith(f"id {i!r}")]


@pytest.fixture
def log(caplog, monkeypatch):
    """The log of uvicorn, some of whose versions do not pass it on to others."""
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    caplog.set_level(logging.INFO, "uvicorn.error")
    return caplog


def test_a_line_for_each_request(server, log):
    body = {**SMALL, "n": 2}
    server.post(COMPLETIONS, body, headers={"x-request-id": "first"})
    server.http.post("/no%0Awhere", headers={"x-request-id": "second"})
    for path in ("/health", "/metrics"):
        server.http.get(path, headers={"x-request-id": "probe"})
    wait_for(lambda: len(lines_of(log, "first", "second")) == 2)
    first, second = lines_of(log, "first", "second")
    assert first.startswith("POST '/v1/completions' 200: 1 tokens in, 2 out")
    assert second.startswith("POST '/no\\nwhere' 404")
    server.complete(**SMALL)
    assert not lines_of(log, "probe")  # those that are well leave none


def test_no_line_if_none_is_wanted(caplog):
    caplog.set_level(logging.INFO, "uvicorn.error")
    with Running(new_parrot(), log_requests=False) as server:
        logging.getLogger("uvicorn").setLevel("INFO")
        server.complete(**SMALL)
        logging.getLogger("uvicorn").setLevel("CRITICAL")
    assert not [
        r
        for r in caplog.records
        if "/v1/completions" in r.getMessage() and r.name == "uvicorn.error"
    ]


# --- names, keys, priorities ---


def test_a_model_may_have_several_names(server):
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == [
        "first",
        "second",
    ]
    assert server.http.get("/v1/models/second").json()["root"] == "first"
    for name, said in (("first", "first"), ("second", "second"), (None, "first")):
        assert server.complete(**SMALL, model=name)["model"] == said


def test_priorities_are_for_those_that_the_server_lets(server):
    for path, body in (
        (COMPLETIONS, SMALL),
        (CHATS, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        error = server.refused(path, {**body, "priority": -5})
        assert error["param"] == "priority" and "--allow-priority" in error["message"]
        server.post(path, {**body, "priority": 0})
    with Running(new_parrot(), allow_priority=True) as other:
        other.complete(**SMALL, priority=-5)


def test_keys_come_from_options_and_from_the_environment(monkeypatch):
    from nanovllm.server import commands

    monkeypatch.setenv("NANOVLLM_API_KEY", "three  four")
    args = cli.parsed(["serve", "--api-key", "one", "--api-key", "two"])
    keys = commands.server_options(args).api_key
    assert keys == ["one", "two", "three", "four"]
    with Running(new_parrot(), api_key=keys) as server:
        for key in (*keys, "five"):
            response = server.http.get("/version", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == (200 if key in keys else 401)


# --- probes ---


def test_probes_may_ask_in_other_ways(server):
    for path in (
        "/health",
        "/health/",
        "/metrics",
        "/v1/models",
        "/v1/models/first",
        "/version",
        "/",
    ):
        response = server.http.head(path)
        assert (response.status_code, response.content) == (200, b""), path
    assert server.http.get("/health/").status_code == 200
    with Running(new_parrot(), api_key=["key"]) as other:
        assert other.http.get("/health/").status_code == 200
        checked_error(other.http.get("/metrics/"), 401)


# --- begin and end ---


def test_a_port_belongs_to_the_first_that_asks_for_it():
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with pytest.raises(ValueError, match=f"port={port}: Address already in use"):
        bind("127.0.0.1", port)
    sock.close()
    bind("127.0.0.1", port).close()


@pytest.mark.slow
def test_a_server_that_is_open_to_all_says_so():
    with Process("--host", "0.0.0.0") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert "may use it" in server.log


def test_sigterm_does_not_wait_for_a_body_or_a_tokenizer(monkeypatch):
    is_over = Event()
    with Running(new_parrot()) as server, ExitStack() as clients:
        body, head, text = (clients.enter_context(server.connect()) for _ in range(3))
        clients.callback(is_over.set)
        body.sendall(request_bytes(COMPLETIONS, SMALL)[:-5])
        head.sendall(b"GET / HT")
        tokenizer = server.engine.told.inputs.tokenizer
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: is_over.wait(60))
        text.sendall(request_bytes("/tokenize", {"prompt": "a b"}))
        wait_for(lambda: server.engine.num_preparing)
        wait_for(lambda: server.http.get("/health").status_code == 200)
        server.uvicorn.handle_exit(signal.SIGTERM, None)
        assert b" 503 " in body.recv(100) and b" 503 " in text.recv(100)
        server.thread.join(60)
        assert not server.thread.is_alive()


@pytest.mark.slow
def test_a_process_does_not_wait_for_a_body():
    with Process() as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address) as sock, socket.create_connection(address) as other:
            sock.sendall(request_bytes(COMPLETIONS, SMALL)[:-5])
            other.sendall(b"GET / HT")
            wait_for(lambda: server.http.get("/health").status_code == 200)
            server.process.send_signal(signal.SIGTERM)
            assert b" 503 " in sock.recv(100)
            assert server.end() == 0 and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_a_process_does_not_wait_for_a_tokenizer():
    with Process("--max-body-bytes", "100000000") as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address) as sock:
            sock.sendall(request_bytes("/tokenize", {"prompt": "a b" * 10_000_000}))
            wait_for(
                lambda: (
                    'num_requests_waiting{model_name="tiny_qwen3"} 1.0'
                    in server.http.get("/metrics").text
                )
            )
            server.process.send_signal(signal.SIGTERM)
            assert b" 503 " in sock.recv(100)
            assert server.end() == 0 and "Traceback" not in server.log, server.log


class Dying(Scheduler):
    """What no recovery mends."""

    def schedule(self):
        raise SystemExit("over")


@pytest.mark.slow
def test_a_server_whose_engine_has_died_ends_with_a_status():
    with Process(
        "--scheduler-cls", "test_operators:Dying", PYTHONPATH=os.pathsep.join(here())
    ) as server:
        answer = server.http.post(COMPLETIONS, json=SMALL)
        assert "SystemExit" in checked_error(answer, 503)["message"]
        assert server.end() == 1 and "Ending: the engine has stopped (SystemExit)" in server.log


def here() -> list[str]:
    return [str(Path(__file__).parent), *sys.path]
