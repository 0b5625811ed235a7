"""A server on a real socket, and a model that says what a test wants to hear.

Tests import this file. An example that does: pytest tests/server/test_server.py
"""

import itertools
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, Semaphore, Thread

import httpx
from fake_model import FakeRunner

from nanovllm import LLM
from nanovllm.topics.checks.blocks import check_blocks
from nanovllm.topics.decoding.drafts import Draft
from nanovllm.topics.server.app import new_app
from nanovllm.topics.server.serve import bind, new_server
from nanovllm.topics.server.settings import ServerOptions

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
EOS = 1535


def wait_for(condition, seconds=60.0):
    """What the condition returns as soon as it is true."""
    end, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    raise AssertionError("it has not happened")


class Running:
    """A server in a thread of its own, for a `with` block."""

    def __init__(self, llm: LLM, **options):
        self.llm = llm
        self.sock = bind("127.0.0.1", 0)
        self.address = self.sock.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        defaults = {"served_model_name": ["org/tiny"], "log_requests": False}
        self.uvicorn = new_server(new_app(llm, ServerOptions(**defaults | options)))
        logging.getLogger("uvicorn").setLevel("CRITICAL")
        self.thread = Thread(target=self.uvicorn.run, args=([self.sock],), daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> "Running":
        self.thread.start()
        wait_for(lambda: self.uvicorn.started)
        return self

    def __exit__(self, *_):
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.sock.close()

    @property
    def routes(self):
        return self.uvicorn.config.app.state.server

    @property
    def engine(self):
        return self.routes.engine

    def post(self, path: str, body=None, status: int = 200, **more) -> dict:
        """The answer's JSON, whose status is as expected."""
        response = self.http.post(path, json=body, **more)
        assert response.status_code == status, response.text
        return response.json()

    def complete(self, **body) -> dict:
        return self.post(COMPLETIONS, body)

    def chat(self, content: str, **body) -> dict:
        messages = [{"role": "user", "content": content}]
        return self.post(CHATS, {"messages": messages, **body})

    def refused(self, path: str, body, status: int = 400, **more) -> dict:
        """The error that a bad body gets, which looks as it should."""
        return checked_error(self.http.post(path, json=body, **more), status)

    def events(self, path: str, body) -> list[dict]:
        """Those of a stream, which ends as it should."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return events_in(response.read().decode())

    def metrics(self) -> dict[str, float]:
        """By name and labels, without our prefix."""
        return read_metrics(self.http.get("/metrics").text)

    def in_engine(self, question):
        """The answer of a function in the engine's thread, between two steps."""
        answer: Future = Future()
        self.engine.inbox.put(lambda: answer.set_result(question()))
        return answer.result(60)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(60)
        sock.connect(self.address)
        return sock

    def check_idle(self) -> None:
        """Waits until nothing is open, and looks whether all blocks are free."""

        def is_idle() -> bool:
            if self.llm.requests or self.engine.live:  # of a client that left in a hurry, too
                return False
            check_blocks(self.llm.block_manager, [])
            assert not self.llm.recovery.suspects
            return True

        wait_for(lambda: not self.engine.open and self.in_engine(is_idle))


@contextmanager
def busy(server):
    """The thread that tokenizes has something to do."""
    is_over = Event()
    work = server.routes.tokenizing.submit(is_over.wait, 60)
    wait_for(work.running)
    try:
        yield
    finally:
        is_over.set()
        work.result(60)


class Process:
    """A command that serves, in a process of its own, for a `with` block. Its `log` is what it has written."""

    def __init__(self, *command: str, **variables: str):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.log = ""
        self.reading = Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.log += line

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def wait_for_log(self, pattern: str) -> re.Match:
        wait_for(lambda: re.search(pattern, self.log) or not self.reading.is_alive())
        match = re.search(pattern, self.log)
        assert match, self.log
        return match

    def end(self, sig: signal.Signals | None = None) -> int:
        """Its status, once it has ended."""
        if sig is not None:
            self.process.send_signal(sig)
        status = self.process.wait(240)
        self.reading.join(10)
        return status


class ServeProcess(Process):
    """`nanovllm serve` with these options."""

    def __init__(self, *options: str, **variables: str):
        words = "-m nanovllm serve --port 0 --num-blocks 800".split()
        super().__init__(sys.executable, *words, *options, **variables)
        url = self.wait_for_log(r"at (http://[\d.]+:\d+)").group(1)
        self.http = httpx.Client(base_url=url, timeout=60)

    def stream(self, num_tokens: int) -> tuple:
        """Of which the first event has come."""
        body = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        response = self.http.send(
            self.http.build_request("POST", COMPLETIONS, json=body), stream=True
        )
        text = response.iter_text()
        return next(part for part in text if "data: " in part), text


def read_metrics(text: str) -> dict[str, float]:
    """By name and labels, without our prefix, and without the model's name, which all have."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'model_name="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            found[name.removeprefix("nanovllm:")] = float(value)
    return found


def events_in(text: str) -> list[dict]:
    """Those of a whole stream. A server that is slow sends comments between them."""
    *events, rest = (part for part in text.split("\n\n") if not part.startswith(":"))
    done = events.pop()
    assert done == "data: [DONE]" and rest == ""
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def checked_error(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    check_error(body["error"], status)
    return body["error"]


def check_error(error: dict, status: int) -> None:
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status or (status == 400 and isinstance(error["code"], str))
    message = error["message"]
    assert isinstance(message, str) and 0 < len(message) <= 1200
    assert isinstance(error["type"], str)
    assert error["param"] is None or 0 < len(error["param"]) <= 100
    assert ".py" not in message and not re.search(r"(^|[\s'\"(])/\w+/\w", message), message


def request_bytes(path: str, body: dict, *headers: str) -> bytes:
    """A whole POST as it is sent."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def read_until(sock: socket.socket, word: bytes) -> bytes:
    data = b""
    while word not in data:
        new = sock.recv(4096)
        assert new, data
        data += new
    return data


class PacedRunner(FakeRunner):
    """Its steps wait for permits while it `is_paced`, and it keeps a record of them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reset()

    def reset(self) -> None:
        self.is_paced = False
        self.permits = Semaphore(0)
        self.num_begun = 0  # steps
        self.holders: list[set] = []  # of each step: the requests with blocks
        self.scheduler = None
        self.before_run = lambda schedule: None

    def launch(self, schedule):
        self.num_begun += 1
        if self.scheduler is not None:
            self.holders.append({*self.scheduler.running})
        if self.is_paced:
            assert self.permits.acquire(timeout=60)
        self.before_run(schedule)
        for seq, start, num_tokens in schedule.scored:
            request = seq.request
            new = seq.token_ids[start + 1 : start + num_tokens + 1]
            request.prompt_logprobs += [{i: -1.0} for i in new]
            del request.prompt_logprobs[len(request.prompt_token_ids) :]
        return super().launch(schedule)

    def run(self, schedule):
        """The token itself is the first of its log-probabilities."""
        tokens, rows = super().run(schedule)
        return tokens, [None if row is None else {i: -9.0} | row for i, row in zip(tokens, rows)]

    def step(self, count: int = 1) -> None:
        """Lets so many steps end, and waits until the next one begins."""
        for _ in range(count):
            num_begun = self.num_begun
            self.permits.release()
            wait_for(lambda before=num_begun: self.num_begun > before)

    def free(self) -> None:
        """No step waits any longer."""
        self.is_paced = False
        self.permits.release(1000)


def new_paced(**options) -> LLM:
    runner = PacedRunner(4, 1536, 400)
    options = dict(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=512) | options
    return LLM(runner=runner, num_blocks=400, block_size=4, **options)


class Parrot:
    """A runner without a model: the answer is what the user has said last, and then the end.

    With a seed, the tokens are smaller: the text falls apart in one of many ways.
    """

    num_host_blocks = 0
    is_asynchronous = False

    def close(self) -> None:
        self.answers.clear()

    def __init__(self, num_blocks: int = 1000):
        self.num_blocks = num_blocks
        self.tokenizer = None  # that of the engine, which comes later
        self.answers: dict = {}

    def tokens_of(self, request) -> list[int]:
        if request not in self.answers:
            text = request.prompt
            if "<|im_start|>user\n" in text:
                text = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            pieces = [text]
            if request.params.seed is not None:
                rng = random.Random(request.params.seed)
                cuts = [0, *sorted(rng.choices(range(len(text) + 1), k=len(text))), len(text)]
                pieces = [text[i:j] for i, j in itertools.pairwise(cuts)]
            ids = [i for piece in pieces for i in self.tokenizer.encode(piece)]
            self.answers[request] = [*ids, EOS]
        return self.answers[request]

    def next_of(self, seq) -> int:
        tokens = self.tokens_of(seq.request)
        is_behind = isinstance(seq, Draft) and seq.num_output_tokens >= len(tokens)
        return EOS if is_behind else tokens[seq.num_output_tokens]

    def launch(self, schedule):
        return lambda: self.run(schedule)

    def run(self, schedule):
        tokens = [self.next_of(seq) for seq in schedule.sampled]
        wants = [seq.request.num_logprobs is not None for seq in schedule.sampled]
        return tokens, [{i: -0.5} if w else None for i, w in zip(tokens, wants)]


# as Qwen's does: it opens or closes the reasoning, and lists the tools
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- if opens_thinking %}<think>
{% endif %}
{%- endif %}"""


def new_parrot(**options) -> LLM:
    runner = Parrot()
    llm = LLM(runner=runner, block_size=16, max_num_seqs=32, **options)
    runner.tokenizer = llm.tokenizer
    llm.tokenizer.chat_template = TEMPLATE
    return llm
