"""Clients that leave, wait and send nonsense; steps, schedulers and engines that fail; signals. A request that has no
part in it gets the answer that it would get alone, and no block is lost.

The model is the fake one of fake_model.py, so that a token that depends on a wrong slot is a wrong token.

Run: pytest tests/server/test_hostile.py [-k disconnect] [--slow]
"""

import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_tools import (
    CHATS,
    COMPLETIONS,
    Running,
    ServeProcess,
    busy,
    check_error,
    checked_error,
    events_in,
    new_paced,
    read_until,
    request_bytes,
    wait_for,
)

from nanovllm import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.topics.server import async_llm
from nanovllm.topics.server.serve import lacks_body

NEIGHBOUR = {"prompt": [5, 6, 7], "max_tokens": 24, "seed": 1, "ignore_eos": True}
SMALL = {"prompt": "a", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


class Moody(Scheduler):
    """A half-right one."""

    is_wrong = False

    def schedule(self):
        return None if self.is_wrong else super().schedule()


@pytest.fixture(scope="module")
def expected() -> str:
    """The neighbour's answer."""
    params = {name: value for name, value in NEIGHBOUR.items() if name != "prompt"}
    outputs = new_paced().generate([NEIGHBOUR["prompt"]], SamplingParams(**params), use_tqdm=False)
    return outputs[0].outputs[0].text


@pytest.fixture(scope="module")
def running():
    with Running(new_paced(scheduler_cls=Moody)) as server:
        # what a client does not read stays in the server
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        yield server
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        # a request may come late whose client has left
        wait_for(lambda: not any(map(server.metrics().get, gauges)))


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def new_client(server, body: dict, path: str = COMPLETIONS) -> socket.socket:
    """Has sent this, and its requests are in the engine's hands."""
    before = len(server.engine.open)
    sock = server.connect()
    sock.sendall(request_bytes(path, body))
    wait_for(lambda: len(server.engine.open) > before)
    return sock


def leave(sock: socket.socket, is_abrupt: bool) -> None:
    if is_abrupt:  # a reset, as from a process that was killed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# --- disconnects ---


@pytest.mark.parametrize("is_abrupt", [False, True])
@pytest.mark.parametrize(
    "more, num_steps, is_waiting",
    [
        ({"stream": True}, 6, False),
        ({"stream": True}, 0, False),
        ({"stream": True, "prompt": [9] * 300}, 3, False),
        ({"stream": True, "n": 3, "logprobs": 2}, 5, False),
        ({"stream": False}, 5, False),
        ({"stream": False, "prompt": [[9, 8], [9, 9]]}, 3, False),
        ({"stream": True}, 3, True),
        ({"stream": False}, 3, True),
    ],
)
def test_after_a_disconnect_the_blocks_are_free_within_two_steps(
    server, pool, expected, monkeypatch, more, num_steps, is_waiting, is_abrupt
):
    llm, runner = server.llm, server.llm.runner
    runner.scheduler = llm.scheduler
    if is_waiting:
        monkeypatch.setattr(llm.scheduler, "max_num_seqs", 1)
    runner.is_paced = True
    neighbour = pool.submit(server.complete, **NEIGHBOUR)
    wait_for(lambda: len(server.engine.open) == 1)
    body = {"prompt": [9, 9, 9], "max_tokens": 100, "ignore_eos": True, **more}
    sock = new_client(server, body)
    requests = {request for request in server.engine.open if request.params.max_tokens == 100}
    runner.step(1 + num_steps)
    assert requests.isdisjoint(llm.scheduler.running) == is_waiting
    leave(sock, is_abrupt)
    wait_for(lambda: len(server.engine.open) == 1)  # the server has noticed
    runner.step(2)
    assert requests.isdisjoint(runner.holders[-1])
    assert not any(request.request_id in llm.requests for request in requests)
    runner.free()
    assert text_of(neighbour.result()) == expected


def test_a_client_that_leaves_before_its_turn_costs_nothing(server, expected):
    """The server has read the body, and its request is not made yet."""
    with busy(server):
        for i in range(4):
            with server.connect() as sock:
                body = {"prompt": "a", "max_tokens": 400, "stream": i % 2 == 0}
                sock.sendall(request_bytes(COMPLETIONS, body))
                wait_for(lambda: server.engine.preparing.total() == 1)
            wait_for(lambda: server.engine.preparing.total() == 0)
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    assert server.llm.runner.num_begun <= 24 + 2


def test_many_clients_that_leave_at_random_moments(server, pool, expected, caplog):
    """Also after a part of a request. It is not a fault of the server, whose log has no error."""
    rng = random.Random(3)

    async def client(i: int) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        body = {"prompt": [5] * rng.randrange(1, 120), "max_tokens": rng.randrange(1, 60)}
        body["n"] = rng.randrange(1, 4)
        data = request_bytes(COMPLETIONS, {**body, "stream": rng.random() < 0.7})
        writer.write(data[: rng.choice([len(data)] * 5 + [rng.randrange(len(data))])])
        await writer.drain()
        if rng.random() < 0.8:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 3000)), rng.random() / 20)
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def clients() -> None:
        await asyncio.gather(*[client(i) for i in range(20)])

    neighbours = [pool.submit(server.complete, **NEIGHBOUR) for _ in range(3)]
    asyncio.run(clients())
    assert {text_of(neighbour.result()) for neighbour in neighbours} == {expected}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_idle_connections_are_closed(server, monkeypatch):
    """Also one that sends a byte now and then. One that gets a stream stays."""
    monkeypatch.setattr("nanovllm.topics.server.serve.LONGEST_IDLE", 0.3)
    stream = new_client(server, {**NEIGHBOUR, "max_tokens": 1500, "stream": True})
    read_until(stream, b"data: ")
    silent = server.connect()
    slow = server.connect()
    slow.sendall(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
    read_until(slow, b"}")
    with pytest.raises(OSError):
        for _ in range(600):
            slow.sendall(b"G")
            time.sleep(0.1)
    with suppress(OSError):
        assert not silent.recv(1)
    read_until(stream, b"data: ")
    leave(stream, True)


# --- too much ---


def test_too_many_wait(server, pool, expected, monkeypatch):
    monkeypatch.setattr(server.engine, "max_waiting", 1)
    server.llm.runner.is_paced = True
    answers = [pool.submit(server.complete, **NEIGHBOUR)]
    wait_for(lambda: server.llm.scheduler.running)
    answers.append(pool.submit(server.complete, **NEIGHBOUR))
    wait_for(lambda: len(server.engine.open) == 2)
    for stream in (False, True):
        response = server.http.post(COMPLETIONS, json={**NEIGHBOUR, "stream": stream})
        error = checked_error(response, 429)
        assert error["type"] == "rate_limit_error" and int(response.headers["retry-after"]) > 0
    assert server.http.get("/health").status_code == 200
    server.llm.runner.free()
    assert [text_of(answer.result()) for answer in answers] == [expected] * 2
    several = {**NEIGHBOUR, "prompt": [[5, 6, 7]] * 4}  # one call alone may have more
    assert {choice["text"] for choice in server.complete(**several)["choices"]} == {expected}


def test_calls_that_wait_for_the_tokenizer_count(server, pool, monkeypatch):
    monkeypatch.setattr(server.engine, "max_waiting", 2)
    with busy(server):
        answers = [pool.submit(server.http.post, COMPLETIONS, json=SMALL) for _ in range(2)]
        wait_for(lambda: server.engine.preparing.total() == 2)
        assert server.metrics()["num_requests_waiting"] == 2
        for path, body in ((COMPLETIONS, SMALL), ("/tokenize", {"prompt": "a"})):
            assert "2 requests wait" in server.refused(path, body, 429)["message"]
    assert {answer.result().status_code for answer in answers} == {200}


LONG = "x" * 257
SCHEMA = {"enum": ["x" * 2**16]}
TOO_MUCH = {
    "a body of 2 MB": (COMPLETIONS, {"prompt": "x" * 2**21}, 413, None),
    "a text that cannot fit": (COMPLETIONS, {"prompt": "the fox " * 60_000}, 400, "prompt"),
    "ids that cannot fit": (COMPLETIONS, {"prompt": [5] * 200_000}, 400, "prompt"),
    "65 prompts": (COMPLETIONS, {**SMALL, "prompt": ["a"] * 65}, 400, "prompt"),
    "17 outputs": (COMPLETIONS, {**SMALL, "n": 17}, 400, "n"),
    "21 log-probabilities": (COMPLETIONS, {**SMALL, "logprobs": 21}, 400, "logprobs"),
    "21 in a chat": (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    "17 stop strings": (COMPLETIONS, {**SMALL, "stop": ["a"] * 17}, 400, "stop"),
    "a long stop string": (COMPLETIONS, {**SMALL, "stop": LONG}, 400, "stop"),
    "65 bad words": (COMPLETIONS, {**SMALL, "bad_words": ["a"] * 65}, 400, "bad_words"),
    "a long bad word": (COMPLETIONS, {**SMALL, "bad_words": [LONG]}, 400, "bad_words"),
    "1,025 stop tokens": (COMPLETIONS, {**SMALL, "stop_token_ids": [5] * 1025}, 400, "stop_token_ids"),
    "1,025 biases": (COMPLETIONS, {**SMALL, "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, 400, "logit_bias"),
    "4,097 messages": (CHATS, {"messages": CHAT["messages"] * 4097}, 400, "messages"),
    "129 tools": (CHATS, {**CHAT, "tools": [{}] * 129}, 400, "tools"),
    "a schema of 64 kB": (COMPLETIONS, {**SMALL, "structured_outputs": {"json": SCHEMA}}, 400, "structured_outputs"),
    "too many entries": (COMPLETIONS, {"prompt": [[5] * 400] * 64, "n": 16, "max_tokens": 100, "logprobs": 20}, 400, "n"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much_is_refused_by_its_field(server, name):
    path, body, status, param = TOO_MUCH[name]
    error = server.refused(path, body, status)
    assert error["param"] == param and re.search(r"\d", error["message"])


def test_a_text_that_cannot_fit_is_not_tokenized(server, monkeypatch):
    tokenizer = server.routes.inputs.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it is tokenized"))
    for path in (COMPLETIONS, "/tokenize"):
        error = server.refused(path, {"prompt": "a b " * 9_000})
        assert "characters" in error["message"] and "max_model_len=512" in error["message"]
        assert error["code"] == "context_length_exceeded"


# --- faults ---


class Boom(Exception):
    pass


def fail_for(server, token_id: int, num_tokens: int) -> None:
    """A step fails that computes so many tokens of a prompt with this first token."""

    def check(schedule):
        for seq, _, _ in schedule.items:
            if seq.token_ids[0] == token_id and len(seq) == num_tokens:
                raise Boom("/secret/place.py")

    server.llm.runner.before_run = check


def test_a_step_that_fails_ends_its_request_and_no_other(server, pool, expected):
    fail_for(server, 9, 3 + 4)
    server.llm.runner.is_paced = True
    neighbours = [pool.submit(server.complete, **NEIGHBOUR) for _ in range(3)]
    body = {**NEIGHBOUR, "prompt": [9, 9, 9]}
    bad = pool.submit(server.http.post, COMPLETIONS, json=body)
    one_of_two = pool.submit(server.http.post, COMPLETIONS, json={**body, "prompt": [[5], [9] * 3]})
    stream = new_client(server, {**body, "stream": True})
    wait_for(lambda: len(server.engine.open) == 7)
    server.llm.runner.step(2)
    data = read_until(stream, b"data: ")
    server.llm.runner.free()
    for answer in (bad, one_of_two):
        error = checked_error(answer.result(), 500)
        assert error["type"] == "server_error" and "Boom" in error["message"]
    data = (data + read_until(stream, b"[DONE]")).decode()
    stream.close()
    *chunks, last = (json.loads(text) for text in re.findall(r"data: (\{.*\})\n", data))
    check_error(last["error"], 500)
    assert len(chunks) == 4 and all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert [text_of(neighbour.result()) for neighbour in neighbours] == [expected] * 3


def test_a_stream_that_waits_sends_its_head_and_comments(server, pool, monkeypatch):
    """A proxy ends a connection on which nothing comes. A later error is an event."""
    monkeypatch.setattr(async_llm, "LONGEST_SILENCE", 0.05)
    fail_for(server, 9, 3)
    server.llm.runner.is_paced = True
    before = [pool.submit(server.complete, **SMALL) for _ in range(8)]
    wait_for(lambda: len(server.engine.open) == 8)
    stream = new_client(server, {**NEIGHBOUR, "prompt": [9] * 3, "stream": True})
    head = read_until(stream, b": waiting") + read_until(stream, b": waiting")
    server.llm.runner.free()
    assert head.startswith(b"HTTP/1.1 200") and b"data:" not in head
    assert b"(Boom)" in read_until(stream, b"[DONE]")
    stream.close()
    assert all(answer.result() for answer in before)


def test_a_scheduler_that_is_half_right(server, pool, expected, monkeypatch):
    server.llm.runner.is_paced = True
    bodies = [{**NEIGHBOUR, "n": n} for n in (1, 2)]
    answers = [pool.submit(server.http.post, COMPLETIONS, json=body) for body in bodies]
    stream = new_client(server, {**NEIGHBOUR, "stream": True})
    wait_for(lambda: len(server.engine.open) == 3)
    server.llm.runner.step(3)
    monkeypatch.setattr(server.llm.scheduler, "is_wrong", True)
    server.llm.runner.free()
    said = "Moody.schedule(): it returned None, and not a Schedule: is a `return` missing?"
    assert [checked_error(answer.result(), 500)["message"] for answer in answers] == [said] * 2
    assert b"Moody.schedule(): it returned None" in read_until(stream, b"[DONE]")
    stream.close()
    monkeypatch.undo()
    assert text_of(server.complete(**NEIGHBOUR)) == expected


def test_the_engines_thread_dies(monkeypatch, pool):
    """All hear of it: those that run, those that come, and a question for the health. The server ends."""
    with Running(new_paced()) as server:
        runner = server.llm.runner
        runner.is_paced = True
        monkeypatch.setattr(server.engine, "on_death", lambda: None)  # it is still asked below
        answer = pool.submit(server.http.post, COMPLETIONS, json=NEIGHBOUR)
        begun = new_client(server, {**NEIGHBOUR, "stream": True})
        wait_for(lambda: len(server.engine.open) == 2)
        runner.step(3)
        read_until(begun, b"data: ")
        early = pool.submit(server.http.post, COMPLETIONS, json={**NEIGHBOUR, "stream": True})
        wait_for(lambda: len(server.engine.open) == 3)

        def dying(*_, **__):
            raise SystemError("/secret/place.py " + "x" * 9000)

        monkeypatch.setattr(server.llm, "step", dying)
        monkeypatch.setattr(server.engine, "_read_inbox", lambda: None)
        runner.free()
        for response in (answer.result(), early.result()):
            assert "SystemError" in checked_error(response, 503)["message"]
        assert b"the engine has stopped" in read_until(begun, b"[DONE]")
        begun.close()
        for path in ("/health", "/metrics"):
            checked_error(server.http.get(path), 503)
        for path, body in ((COMPLETIONS, NEIGHBOUR), ("/tokenize", {"prompt": "a"})):
            response = server.http.post(path, json=body)
            assert int(response.headers["retry-after"]) > 0
            checked_error(response, 503)
        assert not server.engine.open


class Dying(Scheduler):
    def schedule(self):
        raise SystemExit("over")


@pytest.mark.slow
def test_a_server_whose_engine_has_died_ends_with_a_status():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with ServeProcess("--scheduler-cls", "test_hostile:Dying", PYTHONPATH=path) as server:
        answer = server.http.post(COMPLETIONS, json=SMALL)
        assert "SystemExit" in checked_error(answer, 503)["message"]
        assert server.end() == 1


# --- the end ---


def test_at_the_end_those_that_run_finish(pool, expected):
    with Running(new_paced()) as server:
        runner = server.llm.runner
        runner.is_paced = True
        answer = pool.submit(server.complete, **NEIGHBOUR)
        stream = new_client(server, {**NEIGHBOUR, "stream": True})
        wait_for(lambda: len(server.engine.open) == 2)
        watching = server.http.stream("GET", "/live")
        watching.__enter__()
        halves = [server.connect() for _ in range(3)]
        for half in halves:  # a part of a body, which never comes
            half.sendall(request_bytes(COMPLETIONS, NEIGHBOUR)[:-5])
        wait_for(lambda: sum(map(lacks_body, server.uvicorn.server_state.connections)) == 3)
        runner.step(3)
        server.uvicorn.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: not server.routes.live.readers)  # who only watches is sent away
        assert [half.recv(1) for half in halves] == [b""] * 3
        with pytest.raises(OSError):
            server.connect()
        runner.free()
        assert b'"finish_reason": "length"' in read_until(stream, b"[DONE]")
        assert text_of(answer.result()) == expected
        stream.close()
        watching.__exit__(None, None, None)
        server.thread.join(60)
        assert not server.engine.thread.is_alive() and not server.engine.open


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish(sig):
    with ServeProcess() as server:
        # a web page could give its own name the address of this machine
        for name, status in (("localhost:80", 200), ("evil.example", 400)):
            assert server.http.get("/version", headers={"host": name}).status_code == status
        streams = [server.stream(100) for _ in range(2)]
        server.process.send_signal(sig)
        server.wait_for_log("Shutting down")
        for begin, rest in streams:
            events = events_in(begin + "".join(rest))
            assert len(events) == 100 and events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0 and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_without_time_to_drain_streams_are_cut():
    with ServeProcess("--shutdown-timeout", "1") as server:
        _, rest = server.stream(1900)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert "the server is shutting down" in "".join(rest)
        assert server.end() == 0 and "Traceback" not in server.log
        assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_connections_for_which_no_file_is_left_wait():
    with ServeProcess() as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (64, 64))
        address = (server.http.base_url.host, server.http.base_url.port)
        socks = [socket.create_connection(address) for _ in range(100)]
        server.wait_for_log("Too many open files")
        for sock in socks:
            sock.close()
        assert server.http.get("/health").status_code == 200
        assert server.log.count("Too many open files") < 100  # once a second, not for each


# --- anything ---

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e308, 0.5, 1535, 1536]),
    st.text(max_size=6),
    st.lists(
        st.integers(-1, 1600) | st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=2),
        max_size=3,
    ),
    st.dictionaries(st.text(max_size=3), st.integers(-2, 9) | st.text(max_size=3), max_size=2),
)
SENSIBLE = {
    "model": st.sampled_from(["org/tiny", None]),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.integers(0, 6),
    "n": st.integers(1, 9),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 1600), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 1600).map(str), st.integers(-100, 100), max_size=2),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "logprobs": st.integers(0, 3) | st.booleans(),
    "top_logprobs": st.integers(0, 3),
    "role": st.sampled_from(["user", "system", "assistant", "tool"]),
    "content": st.text(max_size=8) | st.just([{"type": "text", "text": "a"}]),
    "prompt": st.text(min_size=1, max_size=8) | st.lists(st.integers(0, 1536), min_size=1, max_size=9),
}  # fmt: skip


def values_of(schema: dict, components: dict, name: str | None = None) -> st.SearchStrategy:
    """What a schema allows, sensible values where we know some, and now and then anything."""
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        own = st.one_of([values_of(one, components) for one in schema["anyOf"]])
    elif "const" in schema or "enum" in schema:
        own = st.sampled_from(schema.get("enum") or [schema["const"]])
    elif schema.get("type") == "object" and "properties" in schema:
        fields = {
            key: values_of(value, components, key) for key, value in schema["properties"].items()
        }
        often = {*schema.get("required", ()), "content", "prompt"}
        required = {key: fields.pop(key) for key in [*fields] if key in often}
        own = some_of(required, fields)
    elif schema.get("type") == "array":
        fewest = int(name == "messages")
        own = st.lists(values_of(schema.get("items", {}), components), min_size=fewest, max_size=3)
    else:
        own = {
            "string": st.text(max_size=6),
            "integer": st.integers(-1, 9),
            "number": st.floats(-2, 3, allow_nan=False),
            "boolean": st.booleans(),
            "null": st.none(),
        }.get(schema.get("type"), JUNK)
    own = SENSIBLE.get(name, own)
    return st.integers(0, 39).flatmap(lambda i: JUNK if i == 23 else own)


@st.composite
def some_of(draw, required: dict, optional: dict) -> dict:
    names = draw(st.lists(st.sampled_from([*optional]), max_size=4)) if optional else []
    chosen = {**required, **{name: optional[name] for name in names}}
    return {name: draw(strategy) for name, strategy in chosen.items()}


def check_answer(response: httpx.Response, path: str, counts: Counter) -> None:
    status = response.status_code
    counts[path, status // 100] += 1
    assert status in (200, 400, 404), response.text
    if status != 200:
        checked_error(response, status)
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = events_in(response.text)
        reasons = [c["finish_reason"] for event in events for c in event["choices"]]
        assert "error" not in events[-1] and len({*reasons} - {None}) > 0
    elif path in (COMPLETIONS, CHATS):
        assert response.json()["usage"]["total_tokens"] > 0


def test_no_body_whatsoever_breaks_the_server(expected, pytestconfig):
    """Bodies from the schema that the server itself hands out, and from around it. For more of them:
    BODIES=10000 pytest tests/server/test_hostile.py -k no_body"""
    is_slow = pytestconfig.getoption("--slow")
    counts: Counter = Counter()
    with Running(new_paced(max_model_len=64)) as server:
        server.llm.runner.vocab_size = 100
        neighbour = {**NEIGHBOUR, "max_tokens": 6}
        answer = text_of(server.complete(**neighbour))
        schema = server.http.get("/openapi.json").json()
        components = schema["components"]["schemas"]
        bodies = {}
        for path, methods in schema["paths"].items():
            if "post" in methods:
                content = methods["post"]["requestBody"]["content"]
                bodies[path] = values_of(content["application/json"]["schema"], components)
        often = [COMPLETIONS, CHATS] * 4 + [*bodies]
        cases = st.sampled_from(often).flatmap(lambda path: st.tuples(st.just(path), bodies[path]))

        @settings(
            max_examples=int(os.environ.get("BODIES", 250 if is_slow else 60)),
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=[*HealthCheck],
        )
        @given(cases)
        def check(case):
            path, body = case
            content = json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            check_answer(server.http.post(path, content=content, headers=headers), path, counts)
            if counts.total() % 20 == 0:
                assert text_of(server.complete(**neighbour)) == answer
                server.check_idle()

        check()
        server.check_idle()
    assert all(counts[path, 2] > 0 for path in (bodies if is_slow else often[:2])), counts
    assert sum(counts[path, 4] for path in often[:2]) > 4, counts
