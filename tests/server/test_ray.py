"""Replicas on Ray: what clients get of two engines is what they get of one; also if one of them dies.

Run: pytest tests/server/test_ray.py [--slow]
What needs processes is one test, a slow one.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from server_tools import Process, read_metrics, wait_for

from nanovllm import LLM, LeastLoaded, PrefixAffinity, Router, SamplingParams
from nanovllm.sequence import Request
from tests.tools.extras import needs

MARK = "NANOVLLM_TEST_OF_REPLICAS"  # in the environment of all that this file starts
SECONDS = 240  # for everything that waits


@pytest.fixture(scope="module", autouse=True)
def ray():
    return needs("ray")


def processes() -> dict[int, str]:
    """All that were started by this run of pytest: their ids and command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={os.getpid()}".encode() in (path / "environ").read_bytes().split(b"\0"):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(path.name)] = command.decode()
        except OSError:  # it has just ended, or is not ours
            continue
    return found


class Served(Process):
    """A server with replicas in other processes. The port in a command is PORT."""

    def __init__(self, *command: str):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = str(sock.getsockname()[1])
        variables = {
            MARK: str(os.getpid()),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(200 * 2**20),
        }
        super().__init__(*[word.replace("PORT", port) for word in command], **variables)
        limits = httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=url, timeout=SECONDS, limits=limits)
        try:
            wait_for(self.is_ready, SECONDS)
        except AssertionError:
            self.kill()
            raise

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def engines(self) -> list[int]:
        found = processes().items()
        return [pid for pid, name in found if "ServeReplica:" in name and ":engine" in name]

    def post(self, body: dict, path: str = "/v1/completions") -> httpx.Response:
        return self.http.post(path, json=body)

    def stream(self, body: dict, leave_after: int | None = None) -> tuple[str, list[dict]]:
        """How it ended, and its events."""
        events = []
        with self.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                return str(answer.status_code), [json.loads(answer.read())]
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return ("error" if "error" in events[-1] else "done"), events
                if line.startswith("data: "):  # else it is a comment
                    events.append(json.loads(line.removeprefix("data: ")))
                if leave_after is not None and len(events) >= leave_after:
                    return "left", events
        return "broken", events

    def stats(self) -> dict[str, float]:
        return read_metrics(self.http.get("/metrics").text)

    def __exit__(self, kind, error, traceback):
        self.http.close()
        if error is None:
            wait_for(lambda: not processes(), SECONDS)
        self.kill()

    def kill(self) -> None:
        for pid in processes():
            os.kill(pid, signal.SIGKILL)


@cache
def answers_of_one_engine() -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=12)
    return [output.outputs[0].text for output in LLM().generate(PROMPTS, params, use_tqdm=False)]


PROMPTS = ["12+7=", "Once upon a time", "3 apples and 4 pears are", "The", "9*3=", "A dog"]


def as_one_engine(served):
    expected = answers_of_one_engine()
    body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 12}
    answer = served.post(body).json()
    assert [choice["text"] for choice in answer["choices"]] == expected
    how, events = served.stream(body)
    texts = Counter()
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = (texts[choice["index"]] or "") + choice["text"]
    assert how == "done" and [texts[i] for i in range(len(PROMPTS))] == expected


def what_crosses_the_border(served):
    """Parameters one way; log-probabilities, usage and reasons the other way."""
    body = {"prompt": "12+7=", "max_tokens": 5, "n": 3, "seed": 1, "logprobs": 2, "echo": True}
    first, second = served.post(body).json(), served.post(body).json()
    assert first["choices"] == second["choices"] and len(first["choices"]) == 3
    assert first["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert first["usage"]["completion_tokens"] <= 15
    stop = served.post({"prompt": "1, 2, 3, 4", "max_tokens": 30, "temperature": 0, "stop": ","})
    assert stop.json()["choices"][0]["finish_reason"] in ("stop", "length")
    chat = {"messages": [{"role": "user", "content": "What is 2+3?"}], "max_tokens": 8}
    (choice,) = served.post(chat, "/v1/chat/completions").json()["choices"]
    assert choice["message"]["role"] == "assistant"
    assert served.post({"prompt": "12+7="}, "/tokenize").json()["count"] == 5


def turns_of_a_conversation_find_their_prefix(served):
    """Several conversations at a time; without affinity, half of the turns would meet a stranger."""

    def talk(user: int) -> list[tuple[int, int]]:
        history = [10 + user] * 40
        found = []
        for turn in range(4):
            usage = served.post({"prompt": history, "max_tokens": 1}).json()["usage"]
            found.append((usage["prompt_tokens_details"]["cached_tokens"], len(history)))
            history = history + [30 + turn] * 16
        return found

    with ThreadPoolExecutor(4) as pool:
        for turns in pool.map(talk, range(4)):
            (first, _), *later = turns
            assert first == 0
            for (cached, _), (_, before) in zip(later, turns):
                assert cached >= before - 8  # all but the block that was not full


def clients_that_leave(served):
    body = {"prompt": [7] * 20, "max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        ends = [*pool.map(lambda i: served.stream(body, leave_after=3)[0], range(8))]
    assert ends == ["left"] * 8

    def is_quiet() -> bool:
        stats = served.stats()
        return stats["num_requests_running"] == stats["num_requests_waiting"] == 0

    wait_for(is_quiet, SECONDS)
    assert served.stats()["kv_cache_usage_perc"] == 0


def full_replicas(served):
    """Sixteen run, some wait, others are told to come again; no request waits forever."""
    body = {"prompt": [9] * 10, "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(64) as pool:
        answers = [*pool.map(lambda _: served.post(body), range(64))]
    counts = Counter(answer.status_code for answer in answers)
    assert counts.keys() == {200, 429} and counts[200] >= 16 + 8, counts
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] and "wait already" in refused.json()["error"]["message"]


def a_replica_dies(served):
    """A request that had a part of its answer gets an error, all others an answer; and there is a new replica."""
    wait_for(lambda: len(served.engines()) == 2, SECONDS)
    victim = served.engines()[0]
    body = {"max_tokens": 300, "ignore_eos": True}
    # one replica has room for all; a busy machine may prepare all eight at a time, and so many may wait
    bodies = [body | {"prompt": [40 + i] * 20} for i in range(4)]
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(served.stream, body) for body in bodies]
        whole = [pool.submit(served.post, body) for body in bodies]
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        assert [answer.result().status_code for answer in whole] == [200] * 4
        ends = [stream.result() for stream in streams]
    for how, events in ends:
        if how == "error":
            assert "has died" in events[-1]["error"]["message"]
        else:
            assert how == "done" and events[-1]["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: len(set(served.engines()) - {victim}) == 2, SECONDS)
    assert served.post({"prompt": "2+2=", "max_tokens": 3}).status_code == 200


@pytest.mark.slow
def test_replicas():
    """One test, so that there is one Ray at a time, however many workers pytest has."""
    options = "serve --replicas 2 --port PORT --max-num-seqs 8 --max-waiting 8 --num-blocks 400"
    options += " --block-size 8 --shutdown-timeout 20"
    with Served(sys.executable, "-m", "nanovllm", *options.split()) as served:
        as_one_engine(served)
        what_crosses_the_border(served)
        turns_of_a_conversation_find_their_prefix(served)
        clients_that_leave(served)
        full_replicas(served)
        a_replica_dies(served)
        assert served.end(signal.SIGTERM) == 0, served.log


# --- without processes ---


def replica(name: str) -> SimpleNamespace:
    return SimpleNamespace(replica_id=name)


def new_router(router_cls: type[Router]):
    from nanovllm.topics.server.replicas import RayRouter

    router = RayRouter.__new__(RayRouter)
    router.initialize_state(router=f"{router_cls.__module__}.{router_cls.__qualname__}")
    return router


def new_work():
    from nanovllm.topics.server.replicas import Work

    return Work(Request("", None, [1] * 20, SamplingParams()), True, 4, 100)


def routed(router, names: str, *args, key: str = ""):
    """What choose_replicas says of the request that Ray calls by this key, and its future."""

    async def ask():
        future = asyncio.get_running_loop().create_future()
        pending = SimpleNamespace(
            args=args or (new_work(),),
            future=future,
            routing_context=SimpleNamespace(),
            metadata=SimpleNamespace(internal_request_id=key),
        )
        ranks = await router.choose_replicas([replica(name) for name in names], pending)
        return [[one.replica_id for one in rank] for rank in ranks], future

    return asyncio.run(ask())


def test_ray_asks_the_router():
    router = new_router(LeastLoaded)
    assert routed(router, "a", key="1")[0] == [["a"]]
    assert routed(router, "ab", key="2")[0] == [["b"]]
    assert routed(router, "b", key="3")[0] == [["b"]]
    assert routed(router, "ab", key="4")[0] == [["a"]]
    router.on_request_completed("b", "2")
    router.on_request_completed("b", "3")
    assert routed(router, "ab", key="5")[0] == [["b"]]
    assert routed(router, "ab", "a question")[0] == [["a", "b"]]
    assert Counter(name for name, _ in router.chosen.values()) == {"a": 2, "b": 1}


def test_requests_that_come_at_once_are_dealt_out():
    """Ray asks for all of them before it sends the first one. They have the same prompt."""
    router = new_router(PrefixAffinity)
    chosen = [routed(router, "ab", key=str(i))[0][0][0] for i in range(40)]
    assert Counter(chosen) == {"a": 20, "b": 20}


def test_what_has_ended_is_not_counted():
    """Also if Ray says so of a question, which was never counted; if a replica has died; and if a client has left
    before its request was sent, of which Ray says nothing."""
    router = new_router(LeastLoaded)
    router.on_request_completed("a", "a question")
    for i in range(100):
        routed(router, [f"replica {i}"], key=str(i))
        router.on_request_completed(f"replica {i}", str(i))
    assert not router.chosen
    left = new_work()
    assert routed(router, "a", left, key="x")[0] == [["a"]]
    left.is_over = True
    assert router.loads("ab") == {"a": 0, "b": 0} and not router.chosen


class OneStream:
    """A simulated handle whose replica says nothing."""

    def __init__(self):
        self.generate = self
        self.num_streams = 0
        self.num_cancelled = 0

    def remote(self, work):
        self.num_streams += 1
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.Event().wait()

    def cancel(self):
        self.num_cancelled += 1


def new_replicas(handle, max_waiting: int = 256):
    """Two replicas with eight seats each."""
    from nanovllm.topics.server.replicas import Replicas

    inputs = LLM(num_blocks=8).inputs
    manager = SimpleNamespace(block_size=4, blocks=[None] * 9)
    inputs.scheduler = SimpleNamespace(block_manager=manager, max_num_seqs=8)
    return Replicas(handle, inputs, 2, max_waiting)


def some_requests(count: int) -> list[Request]:
    return [Request("", None, [1], SamplingParams()) for _ in range(count)]


def test_a_call_is_admitted_as_a_whole():
    """Two times eight seats are counted: what finds none waits."""
    from nanovllm.topics.server.errors import Refused

    async def submit():
        replicas = new_replicas(OneStream(), max_waiting=8)
        first = replicas.stream(some_requests(40))
        asking = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        assert len(replicas.open) == 40
        with pytest.raises(Refused, match="24 requests wait already, at most 8 may"):
            await anext(replicas.stream(some_requests(1)))
        asking.cancel()
        replicas.close()

    asyncio.run(submit())


class Deaths(OneStream):
    """A simulated handle: the first replica says this and dies, the second one answers."""

    def __init__(self, *deltas):
        super().__init__()
        self.deltas = deltas

    def remote(self, work):
        from nanovllm.topics.server.async_llm import Delta

        last = Delta(output=SimpleNamespace(outputs=[]))
        self.answer = iter([[*self.deltas]] if self.num_streams == 0 else [[last]])
        return super().remote(work)

    async def __anext__(self):
        from ray.exceptions import RayError

        for batch in self.answer:
            return batch
        raise RayError("it has died") if self.num_streams == 1 else StopAsyncIteration


@pytest.mark.parametrize("has_answered", [False, True])
def test_only_what_has_answered_is_not_tried_again(has_answered):
    from nanovllm.topics.server.async_llm import Delta
    from nanovllm.topics.server.errors import Unavailable

    async def serve():
        handle = Deaths(*[Delta(parts=["some text"])] * has_answered)
        replicas = new_replicas(handle)
        try:
            found = [delta async for _, delta in replicas.stream(some_requests(1))]
            assert found[-1].output is not None and not has_answered
        except Unavailable:
            assert has_answered
        replicas.close()
        assert handle.num_streams == 2 - has_answered

    asyncio.run(serve())


class Answers:
    """A simulated handle: what the replicas answer to a question."""

    def __init__(self, *answers):
        self.answers = answers

    def broadcast(self, question):
        return self

    async def results_async(self, return_exceptions):
        if not self.answers:
            from ray.serve.exceptions import DeploymentUnavailableError

            raise DeploymentUnavailableError("engine")
        return [*self.answers]


def test_counters_never_go_back():
    """What a replica that has died had counted stays in the sums; what it had running does not."""

    def stats(name: str, count: int):
        return name, {
            **dict.fromkeys(("requests_running", "kv_blocks"), 10),
            **dict.fromkeys(("prompt_tokens", "output_tokens"), count),
            **dict.fromkeys(("preemptions", "prefix_cache_hit_tokens"), count),
            "accepted_draft_tokens": count,
        }

    rounds = [
        ([stats("a", 100), stats("b", 50)], 150, 20),
        ([ValueError("b has died"), stats("a", 110)], 160, 10),
        ([stats("a", 120), stats("c", 0)], 170, 20),
        ([], 170, 0),
        ([stats("c", 5)], 175, 10),
        ([stats("b", 60), stats("c", 5)], 185, 20),  # it only could not answer in time
    ]

    async def ask():
        replicas = new_replicas(OneStream())
        for answers, counted, now in rounds:
            replicas.engines = Answers(*answers)
            total = await replicas.stats()
            assert total["prompt_tokens"] == total["preemptions"] == counted
            assert total["accepted_draft_tokens"] == counted
            assert total.get("requests_running", 0) == total.get("kv_blocks", 0) == now
        replicas.close()

    asyncio.run(ask())


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_who_leaves_is_forgotten(turns):
    """Also before anything has been sent, and when the server ends."""
    from nanovllm.topics.server.errors import Unavailable

    async def leave():
        handle = OneStream()
        replicas = new_replicas(handle)
        requests, others = some_requests(3), some_requests(3)
        replicas.opened(requests, True)
        kept = replicas.opened(others, True)
        for _ in range(turns):
            await asyncio.sleep(0)
        replicas.leave(requests)
        for _ in range(3):
            await asyncio.sleep(0)
        assert replicas.open.keys() == set(others) == replicas.tasks.keys()
        replicas.close()
        assert [type(kept.get_nowait()[1]) for _ in others] == [Unavailable] * 3
        for _ in range(3):
            await asyncio.sleep(0)
        assert not replicas.open and not replicas.tasks
        assert handle.num_cancelled == handle.num_streams
        with pytest.raises(Unavailable):
            await anext(replicas.stream(requests))

    asyncio.run(leave())


@pytest.mark.parametrize(
    "choose, words",
    [(lambda *_: "z", "'z' is not one of ['a', 'b']"), (lambda *_: {}["oh"], "oh")],
)
def test_a_router_that_fails_fails_the_request(monkeypatch, choose, words):
    """Ray would log the error and try again, forever."""
    monkeypatch.setattr(LeastLoaded, "choose", choose)
    _, future = routed(new_router(LeastLoaded), "ab")
    assert words in str(future.exception())


def test_machines_without_room():
    from nanovllm.topics.server.scaling import check_room

    machines = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 3.0}, {"CPU": 64.0}]
    check_room(machines, {"CPU": 1.0, "GPU": 2}, 3)
    check_room(machines, {"CPU": 0.5, "GPU": 0}, 160)
    said = "each needs 1 CPU and 2 GPU, so Ray's machines have room for 3"
    with pytest.raises(ValueError, match=f"replicas=4 is not allowed: {said}"):
        check_room(machines, {"CPU": 1.0, "GPU": 2}, 4)


def test_replicas_that_cannot_be_made(monkeypatch):
    """What Ray says is long, and where the reason is, changes. The user gets the reason."""
    from nanovllm.topics.server import scaling

    message = "The deployment failed 2 times\n  File x, line 3\nValueError: no memory is left\n\n"
    app = SimpleNamespace(deployments={"engine": SimpleNamespace(message=message)})
    status = SimpleNamespace(applications={"nanovllm": app})

    def fail(*args, **kwargs):
        raise RuntimeError("Deploying application nanovllm failed")

    monkeypatch.setattr(scaling.serve, "run", fail)
    monkeypatch.setattr(scaling.serve, "status", lambda: status)
    said = "the replicas do not start: ValueError: no memory is left"
    with pytest.raises(ValueError, match=said):
        scaling.start(None)
