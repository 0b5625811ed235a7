"""Clients that leave, dawdle and send nonsense, steps and schedulers that fail, signals: a request that is not meant gets the
answer that it would get alone, and no block is lost.

The model is the fake one of fake_model.py, so that a token that depends on a wrong slot is a wrong token.

Run: pytest tests/server/test_server_hostile.py [-k disconnect] [--slow]
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from http.client import HTTPResponse
from threading import Event

import httpx
import pytest
from defaults import check_with
from fake_model import FakeRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_tools import (
    PacedRunner,
    Process,
    Running,
    check_error,
    checked_error,
    events_in,
    is_busy,
    left_idle,
    request_bytes,
    wait_for,
)

from nanovllm import LLM, SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.server.async_llm import AsyncLLM
from nanovllm.server.streams import AT_A_TIME, Delta, Stream

BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS = 4, 1536, 400
COMPLETIONS = "/v1/completions"
NEIGHBOUR = {"prompt": [5, 6, 7], "max_tokens": 24, "seed": 1, "ignore_eos": True}


class Moody(Scheduler):
    """A half-right one."""

    is_wrong = False

    def schedule(self):
        return None if self.is_wrong else super().schedule()


def new_llm(runner=None, **more) -> LLM:
    runner = runner or FakeRunner(BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS)
    options = dict(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=512) | more
    return LLM(runner=runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)


def alone(prompt, **params) -> str:
    (output,) = new_llm().generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output.outputs[0].text


@pytest.fixture(scope="module")
def expected() -> str:
    """The neighbour's answer."""
    return alone(**NEIGHBOUR)


@pytest.fixture(scope="module")
def running():
    runner = PacedRunner(BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS)
    with Running(new_llm(runner, scheduler_cls=Moody)) as server:
        # what a client does not read stays in the server
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        yield server


@pytest.fixture
def server(running, monkeypatch):
    runner = running.llm.runner
    runner.reset()
    runner.scheduler = running.llm.scheduler
    running.llm.scheduler.is_wrong = False
    with left_idle(running):
        yield running
        runner.free()
        monkeypatch.undo()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    # a request may come late whose client has left
    wait_for(lambda: not any(map(running.metrics().get, gauges)))


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


def read_until(sock: socket.socket, word: bytes) -> bytes:
    data = b""
    while word not in data:
        new = sock.recv(4096)
        assert new, data
        data += new
    return data


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
        ({"stream": False, "prompt": [9] * 300}, 3, False),
        ({"stream": False, "prompt": [[9, 8], [9, 9]]}, 3, False),
        ({"stream": True}, 3, True),
        ({"stream": False}, 3, True),
    ],
)
def test_after_a_disconnect_the_blocks_are_free_within_two_steps(
    server, pool, expected, monkeypatch, more, num_steps, is_waiting, is_abrupt
):
    llm, runner = server.llm, server.llm.runner
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
    if body["stream"] and num_steps and not is_waiting and len(body["prompt"]) < 300:
        read_until(sock, b"data: ")
    leave(sock, is_abrupt)
    wait_for(lambda: len(server.engine.open) == 1)  # the server has noticed
    runner.step(2)
    assert requests.isdisjoint(runner.holders[-1])
    assert not any(request.request_id in llm.requests for request in requests)
    runner.free()
    assert text_of(neighbour.result()) == expected


def test_a_client_that_leaves_before_its_turn_costs_nothing(server, expected):
    """Its body has been read, and its request has not been made."""
    runner = server.llm.runner
    may_prepare = Event()
    server.engine.short.jobs.put(lambda: may_prepare.wait(60))
    for i in range(4):
        with server.connect() as sock:
            body = {"prompt": "a", "max_tokens": 400, "stream": i % 2 == 0}
            sock.sendall(request_bytes(COMPLETIONS, body))
            wait_for(lambda: server.engine.num_preparing == 1)
        wait_for(lambda: server.engine.num_preparing == 0)  # it is not counted any longer
    wait_for(lambda: not any(map(is_busy, server.uvicorn.server_state.connections)))
    runner.is_paced = True
    may_prepare.set()
    wait_for(lambda: not server.uvicorn.server_state.tasks)
    runner.free()
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    assert runner.num_begun <= 24 + 2


@pytest.mark.parametrize("stream", [False, True])
def test_pipelined_requests_end_with_their_connection(server, expected, caplog, stream):
    """The one that runs, and those that have not begun: uvicorn tells the last one only."""
    runner = server.llm.runner
    runner.is_paced = True
    body = {"prompt": [9, 9, 9], "max_tokens": 300, "ignore_eos": True, "stream": stream}
    with server.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, body) * 3)
        wait_for(lambda: len(server.engine.open) == 1)
        runner.step(4)
    wait_for(lambda: len(server.engine.open) == 0)
    wait_for(lambda: not server.uvicorn.server_state.tasks)
    runner.free()
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    assert runner.num_begun <= 24 + 8
    assert "Exception in ASGI" not in caplog.text


def test_an_upgrade_is_refused_in_words(server):
    """Some clients offer HTTP/2 so; the parser then takes the body for the new protocol."""
    more = "Connection: Upgrade\r\nUpgrade: h2c"
    with server.connect() as sock:
        sock.sendall(request_bytes(COMPLETIONS, NEIGHBOUR, more))
        answer = read_until(sock, b"}")
    assert b" 400 " in answer and b"there is no upgrade here" in answer


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_many_clients_that_leave_at_random_moments(server, pool, expected, count):
    rng = random.Random(3)

    async def client(i: int) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        body = {
            "prompt": [5] * rng.randrange(1, 120),
            "max_tokens": rng.randrange(1, 60),
            "n": rng.randrange(1, 4),
        }
        data = request_bytes(COMPLETIONS, {**body, "stream": rng.random() < 0.7})
        writer.write(data[: rng.choice([len(data)] * 5 + [len(data) // 2])])
        await writer.drain()
        if rng.random() < 0.8:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 3000)), rng.random() / 20)
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def clients() -> None:
        await asyncio.gather(*[client(i) for i in range(count)])

    neighbours = [pool.submit(server.complete, **NEIGHBOUR) for _ in range(3)]
    asyncio.run(clients())
    assert {text_of(neighbour.result()) for neighbour in neighbours} == {expected}


# --- clients that dawdle ---


def test_a_client_that_reads_one_byte_at_a_time_gets_all_of_it(server, expected):
    """The end comes while the server still waits for the client to read."""
    runner = server.llm.runner
    runner.is_paced = True
    body = {**NEIGHBOUR, "max_tokens": 250, "n": 4}
    with server.connect(receive_buffer=16384) as sock:
        sock.sendall(request_bytes(COMPLETIONS, {**body, "stream": True}, "Connection: close"))
        wait_for(lambda: runner.num_begun)
        mine = sock.getsockname()  # connections of earlier tests may still end
        (connection,) = (c for c in server.uvicorn.server_state.connections if c.client == mine)
        while not connection.flow.write_paused:
            runner.step()
        runner.free()
        wait_for(lambda: not server.engine.open)
        assert connection.flow.write_paused and is_busy(connection)
        begin = b"".join(sock.recv(1) for _ in range(2000))
        assert text_of(server.complete(**NEIGHBOUR)) == expected
        data = begin + b"".join(iter(lambda: sock.recv(65536), b""))
    events = events_of(data)
    assert len(events) == 4 * 250 and events[-1]["choices"][0]["finish_reason"] == "length"


class Received:
    """What http.client takes for a socket."""

    def __init__(self, file):
        self.file = file

    def makefile(self, *_):
        return self.file


def events_of(data: bytes) -> list[dict]:
    """Of a whole response with a stream."""
    from io import BytesIO

    response = HTTPResponse(Received(BytesIO(data)))
    response.begin()
    assert response.status == 200
    return events_in(response.read().decode())


def test_a_slow_client_leaves(server, pool, expected):
    body = {**NEIGHBOUR, "max_tokens": 400, "n": 3, "stream": True}
    sock = server.connect(receive_buffer=16384)
    sock.sendall(request_bytes(COMPLETIONS, body))
    read_until(sock, b"data: ")
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    leave(sock, True)


def test_a_body_that_comes_slowly(server, expected):
    data = request_bytes(COMPLETIONS, NEIGHBOUR, "Connection: close")
    with server.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(0, len(data), 7):
            sock.sendall(data[i : i + 7])
            if i % 70 == 0:
                assert server.http.get("/health").status_code == 200
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert text_of(json.loads(answer.partition(b"\r\n\r\n")[2])) == expected


@pytest.mark.parametrize("num_missing", [1, 20, 60, 150])
def test_half_a_request_and_then_nothing(server, expected, caplog, num_missing):
    """It is no fault of the server, whose log stays empty."""
    data = request_bytes(COMPLETIONS, NEIGHBOUR)
    for is_abrupt in (False, True):
        sock = server.connect()
        sock.sendall(data[:-num_missing])
        leave(sock, is_abrupt)
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_requests_that_are_sent_without_waiting_are_answered_in_order(server, expected):
    stream = {**NEIGHBOUR, "stream": True}
    with server.connect() as sock:
        sock.sendall(
            request_bytes(COMPLETIONS, NEIGHBOUR)
            + request_bytes(COMPLETIONS, {"prompt": 5})
            + request_bytes(COMPLETIONS, stream)
            + request_bytes("/tokenize", {"prompt": "a"}, "Connection: close")
        )
        file = sock.makefile("rb")
        file.close = lambda: None  # a response would close it
        bodies = []
        for status in (200, 400, 200, 200):
            response = HTTPResponse(Received(file))
            response.begin()
            assert response.status == status
            bodies.append(response.read().decode())
    assert text_of(json.loads(bodies[0])) == expected
    check_error(json.loads(bodies[1])["error"], 400)
    assert "".join(map(text_of, events_in(bodies[2]))) == expected
    assert json.loads(bodies[3])["count"] == 1


def test_what_is_no_http(server):
    for data in (
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
        b"\x00" * 99,
    ):
        with server.connect() as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda sock=sock: sock.recv(4096), b""))
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert server.http.get("/health").status_code == 200


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
        assert response.headers["x-request-id"]
    assert server.http.get("/health").status_code == 200
    server.llm.runner.free()
    assert [text_of(answer.result()) for answer in answers] == [expected] * 2
    several = {**NEIGHBOUR, "prompt": [[5, 6, 7]] * 4}  # one call alone may have more
    assert {choice["text"] for choice in server.complete(**several)["choices"]} == {expected}


def test_a_body_that_is_too_long(server, expected, monkeypatch):
    monkeypatch.setattr(server.uvicorn.server.options, "max_body_bytes", 1000)
    headers = {"content-type": "application/json"}
    long = json.dumps({"prompt": "x" * 2_000_000}).encode()
    pieces = (long[i : i + 5000] for i in range(0, len(long), 5000))
    for content in (long, pieces):
        response = httpx.post(server.url + COMPLETIONS, content=content, headers=headers)
        assert "1,000 bytes" in checked_error(response, 413)["message"]
    assert text_of(server.complete(**NEIGHBOUR)) == expected


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


def test_a_step_that_fails_ends_its_request_and_nobody_elses(server, pool, expected):
    fail_for(server, 9, 3 + 4)
    server.llm.runner.is_paced = True
    neighbours = [pool.submit(server.complete, **NEIGHBOUR) for _ in range(3)]
    body = {**NEIGHBOUR, "prompt": [9, 9, 9]}
    bad = pool.submit(server.http.post, COMPLETIONS, json=body, headers={"x-request-id": "bad"})
    stream = new_client(server, {**body, "stream": True})
    wait_for(lambda: len(server.engine.open) == 5)
    server.llm.runner.step(2)
    data = read_until(stream, b"data: ")
    server.llm.runner.free()
    response = bad.result()
    error = checked_error(response, 500)
    assert error["type"] == "server_error" and "Boom" in error["message"]
    assert response.headers["x-request-id"] == "bad"
    data = (data + read_until(stream, b"[DONE]")).decode()
    stream.close()
    *chunks, last = (json.loads(text) for text in re.findall(r"data: (\{.*\})\n", data))
    check_error(last["error"], 500)
    assert len(chunks) == 4 and all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert [text_of(neighbour.result()) for neighbour in neighbours] == [expected] * 3


def test_a_stream_whose_first_step_fails_has_a_status(server):
    fail_for(server, 9, 3)
    checked_error(server.http.post(COMPLETIONS, json={"prompt": [9, 9, 9], "stream": True}), 500)
    error = server.refused(COMPLETIONS, {"prompt": [[5], [9, 9, 9]]}, 500)
    assert "Boom" in error["message"]


def test_a_scheduler_that_is_half_right(server, pool, expected):
    server.llm.runner.is_paced = True
    answers = [
        pool.submit(server.http.post, COMPLETIONS, json={**NEIGHBOUR, "n": n}) for n in (1, 2)
    ]
    stream = new_client(server, {**NEIGHBOUR, "stream": True})
    wait_for(lambda: len(server.engine.open) == 3)
    server.llm.runner.step(3)
    server.llm.scheduler.is_wrong = True
    server.llm.runner.free()
    for answer in answers:
        message = checked_error(answer.result(), 500)["message"]
        assert message == "Moody.schedule(): it returned None, and not a Schedule"
    data = read_until(stream, b"[DONE]")
    assert b"Moody.schedule(): it returned None" in data
    stream.close()
    server.llm.scheduler.is_wrong = False
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    assert server.http.get("/health").status_code == 200


def test_the_engines_thread_dies(monkeypatch, pool):
    """All hear of it: those that run, those that come, and a question for the health."""
    runner = PacedRunner(BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS)
    runner.is_paced = True
    with Running(new_llm(runner)) as server:
        answer = pool.submit(server.http.post, COMPLETIONS, json=NEIGHBOUR)
        begun = new_client(server, {**NEIGHBOUR, "stream": True})
        wait_for(lambda: len(server.engine.open) == 2)
        runner.step(3)
        read_until(begun, b"data: ")
        early = pool.submit(server.http.post, COMPLETIONS, json={**NEIGHBOUR, "stream": True})
        wait_for(lambda: len(server.engine.open) == 3)
        question = pool.submit(server.http.get, "/metrics")
        wait_for(lambda: server.engine.waiting)

        def dying(*_, **__):
            raise SystemError("/secret/place.py " + "x" * 9000)

        monkeypatch.setattr(server.llm, "step", dying)
        monkeypatch.setattr(server.engine, "_read_inbox", lambda: None)
        runner.free()
        for response in (answer.result(), early.result(), question.result()):
            assert "SystemError" in checked_error(response, 503)["message"]
        assert b"the engine has stopped" in read_until(begun, b"[DONE]")
        begun.close()
        for path in ("/health", "/metrics"):
            checked_error(server.http.get(path), 503)
        for path, body in ((COMPLETIONS, NEIGHBOUR), ("/tokenize", {"prompt": "a"})):
            response = server.http.post(path, json=body)
            assert int(response.headers["retry-after"]) > 0
            checked_error(response, 503)
        assert not server.engine.open and not server.engine.waiting


def test_a_question_whose_asker_has_left(server, expected):
    """Before the engine's thread comes to it, or in the middle of it: an answer that nothing waits for does no harm."""
    has_begun, go, answered = Event(), Event(), []

    async def ask_and_leave() -> None:
        middle = asyncio.ensure_future(server.engine.ask(lambda: (has_begun.set(), go.wait(60))))
        await asyncio.to_thread(has_begun.wait, 60)
        before = asyncio.ensure_future(server.engine.ask(lambda: answered.append(1)))
        await asyncio.sleep(0)
        for question in (middle, before):
            question.cancel()
        await asyncio.wait([middle, before])
        assert middle.cancelled() and before.cancelled() and not server.engine.waiting
        go.set()

    asyncio.run_coroutine_threadsafe(ask_and_leave(), server.engine.loop).result(60)
    assert text_of(server.complete(**NEIGHBOUR)) == expected
    assert not answered and server.engine.thread.is_alive()


# --- the end ---


def running_alone(server, pool, call, *args, **kwargs) -> Future:
    """Of a call whose first step waits for its permit."""
    server.llm.runner.is_paced = True
    future = pool.submit(call, *args, **kwargs)
    wait_for(lambda: len(server.engine.open) == 1)
    return future


def ending(server, drain_seconds: float) -> socket.socket:
    """A stream has begun, and then the signal comes. Steps wait for permits."""
    server.uvicorn.server.options.drain_seconds = drain_seconds
    stream = new_client(server, {**NEIGHBOUR, "stream": True})
    server.llm.runner.step(3)
    read_until(stream, b"data: ")
    server.uvicorn.handle_exit(signal.SIGTERM, None)
    wait_for(lambda: server.engine.is_draining)
    return stream


def test_at_the_end_those_that_run_finish_and_nobody_else_begins(pool, expected):
    runner = PacedRunner(BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS)
    with Running(new_llm(runner)) as server:
        answer = running_alone(server, pool, server.complete, **NEIGHBOUR)
        stream = ending(server, 60)
        for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize"):
            response = server.http.post(path, json=NEIGHBOUR)
            assert int(response.headers["retry-after"]) > 0
            checked_error(response, 503)
        checked_error(server.http.get("/health"), 503)
        runner.free()
        data = read_until(stream, b"[DONE]")
        assert b'"finish_reason": "length"' in data and b"error" not in data
        assert text_of(answer.result()) == expected
        stream.close()
        server.thread.join(60)
        assert not server.engine.thread.is_alive() and not server.engine.open


def test_at_the_end_those_that_run_too_long_hear_why(pool):
    runner = PacedRunner(BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS)
    with Running(new_llm(runner)) as server:
        answer = running_alone(server, pool, server.http.post, COMPLETIONS, json=NEIGHBOUR)
        question = pool.submit(server.http.get, "/metrics")
        stream = ending(server, 0)
        assert "shutting down" in checked_error(answer.result(), 503)["message"]
        data = read_until(stream, b"[DONE]")
        assert b"the server is shutting down" in data
        stream.close()
        assert question.result().status_code in (200, 503)
        runner.free()
        server.thread.join(60)
        assert not server.engine.thread.is_alive() and not server.engine.open


def check_drains(sig: int) -> None:
    with Process() as server:
        streams = [server.stream(100) for _ in range(2)]
        server.process.send_signal(sig)
        server.read_until("Shutting down: 2 requests")
        checked_error(server.http.post(COMPLETIONS, json=NEIGHBOUR), 503)
        checked_error(server.http.get("/health"), 503)
        for begin, rest in streams:
            events = events_in(begin + "".join(rest))
            assert len(events) == 100 and events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.end() == 0 and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_sigterm_lets_streams_finish():
    check_drains(signal.SIGTERM)


@pytest.mark.slow
def test_sigint_lets_streams_finish():
    check_drains(signal.SIGINT)


def check_cut_off(begin: str, rest) -> None:
    *_, last, done, empty = (begin + "".join(rest)).split("\n\n")
    check_error(json.loads(last.removeprefix("data: "))["error"], 503)
    assert done == "data: [DONE]" and empty == ""


@pytest.mark.slow
def test_without_time_to_drain_streams_end_with_an_error():
    with Process("--drain-seconds", "0") as server:
        stream = server.stream(1900)
        server.process.send_signal(signal.SIGTERM)
        check_cut_off(*stream)
        assert server.end() == 0 and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_a_second_signal_ends_at_once():
    with Process("--drain-seconds", "1000") as server:
        stream = server.stream(1900)
        server.process.send_signal(signal.SIGINT)
        server.read_until("Shutting down: 1 requests")
        server.process.send_signal(signal.SIGINT)
        check_cut_off(*stream)
        assert server.end() == 0 and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_a_third_signal_waits_for_no_client():
    """Of whom one does not read."""
    with Process() as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = {
            "prompt": "a",
            "max_tokens": 1900,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
        }
        sock.sendall(request_bytes(COMPLETIONS, body))
        read_until(sock, b"data: ")
        for line in ("Shutting down: 1 requests", r"Shutting down$", "Finished"):
            server.process.send_signal(signal.SIGTERM)
            server.read_until(line)
        server.end()


@pytest.mark.slow
def test_a_signal_while_nobody_is_there():
    with Process() as server:
        assert server.http.get("/health").status_code == 200  # its connection stays open
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0 and "Traceback" not in server.log, server.log


# --- many ---


def test_many_streams_leave_the_loop_time_between_them():
    """What a step brings to forty streams is dealt out over several turns of the loop, in order."""

    async def turns() -> None:
        engine = AsyncLLM(LLM(num_blocks=8))
        streams = [Stream([name], True, engine.leave) for name in range(40)]
        engine.open.update((i, (stream, 0)) for i, stream in enumerate(streams))
        steps = [[(i, Delta(gaps=[step])) for i in range(40)] for step in range(2)]
        engine._hear(steps[0])
        num_told = []
        while sum(num_told) < 80:
            num_told.append(sum(len(stream.deltas) for stream in streams) - sum(num_told))
            if len(num_told) == 3:
                engine._hear(steps[1])  # while the first is on its way
            await asyncio.sleep(0)
        assert max(num_told) <= AT_A_TIME
        assert all([delta.gaps for delta in one.deltas] == [[0], [1]] for one in streams)
        engine.open.clear()
        engine.close()
        engine.thread.join()

    asyncio.run(turns())


def test_sixteen_threads_tokenize_while_others_stream(server, pool, expected):
    texts = [f"{i} dogs and {i * i} cats \u2603" for i in range(16)]
    token_ids = [server.llm.tokenizer.encode(text) for text in texts]

    def tokenize(i: int) -> None:
        for _ in range(6):
            assert server.post("/tokenize", {"prompt": texts[i]})["tokens"] == token_ids[i]
            assert server.post("/detokenize", {"tokens": token_ids[i]})["prompt"] == texts[i]

    streams = [pool.submit(server.events, COMPLETIONS, NEIGHBOUR) for _ in range(6)]
    others = [pool.submit(tokenize, i) for i in range(16)]
    for other in others:
        other.result()
    for stream in streams:
        assert "".join(map(text_of, stream.result())) == expected


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
    return {
        name: draw(strategy)
        for name, strategy in {**required, **{n: optional[n] for n in names}}.items()
    }


def check_answer(response: httpx.Response, path: str, counts: Counter) -> None:
    status = response.status_code
    counts[path, status // 100] += 1
    assert status in (200, 400, 404), response.text
    if status != 200:
        checked_error(response, status)
    elif path == "/v1/responses":
        assert '"status": "completed"' in response.text or '"status": "incomplete"' in response.text
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = events_in(response.text)
        reasons = [c["finish_reason"] for event in events for c in event["choices"]]
        assert "error" not in events[-1] and len({*reasons} - {None}) > 0
    else:
        body = response.json()
        assert (
            path not in (COMPLETIONS, "/v1/chat/completions") or body["usage"]["total_tokens"] > 0
        )
        assert path != "/tokenize" or body["count"] == len(body["tokens"])


def test_no_body_whatsoever_breaks_the_server(expected, pytestconfig):
    """Bodies from the schema that the server itself hands out, and from around it. For more of them:
    BODIES=10000 pytest tests/server/test_server_hostile.py -k no_body"""
    is_slow = pytestconfig.getoption("--slow")
    runner = PacedRunner(BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS)
    runner.vocab_size = 100
    counts: Counter = Counter()
    with Running(new_llm(runner, max_model_len=64), max_tokens_per_call=300) as server:
        neighbour = {**NEIGHBOUR, "max_tokens": 6}
        answer = text_of(server.complete(**neighbour))
        schema = server.http.get("/openapi.json").json()
        paths = {
            path: methods["post"] for path, methods in schema["paths"].items() if "post" in methods
        }
        components = schema["components"]["schemas"]
        bodies = {
            path: values_of(
                post["requestBody"]["content"]["application/json"]["schema"], components
            )
            for path, post in paths.items()
        }
        often = [COMPLETIONS, "/v1/chat/completions"] * 4 + [*bodies]
        cases = st.sampled_from(often).flatmap(lambda path: st.tuples(st.just(path), bodies[path]))

        @settings(
            max_examples=int(os.environ.get("BODIES", 500 if is_slow else 60)),
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


@pytest.mark.slow
def test_what_holds_for_a_cpu_holds_for_news_that_are_made_a_step_later():
    """As on a GPU."""
    check_with("asynchronous_default", ["server/test_server.py"])
