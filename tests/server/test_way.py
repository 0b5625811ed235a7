"""The way of a streamed chat through the server: as few functions as a reader can follow, and those that gate.py names.

Run: pytest tests/server/test_way.py
"""

import asyncio
import json
import re
import sys
import threading
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.server import gate
from nanovllm.server.app import new_app
from nanovllm.server.settings import ServerOptions

SERVER = Path(gate.__file__).parent
MOST_FUNCTIONS = 70


async def streamed_chat(app) -> str:
    """What the app sends, without a network."""
    content = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
    coming = [{"type": "http.request", "body": json.dumps(content).encode()}]
    sent = []

    async def receive():
        if coming:
            return coming.pop()
        await asyncio.Event().wait()  # the client stays

    async def send(message):
        sent.append(message.get("body", b"").decode())

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return "".join(sent)


@pytest.fixture(scope="module")
def passed() -> set[tuple[str, str, int]]:
    """(file, name, line) of the functions that run for one chat, in all threads; comprehensions are not counted. It is
    not the first chat: an app builds its layers once."""
    found, is_counting = set(), threading.Event()

    def profile(frame, event, arg):
        code = frame.f_code
        path = Path(code.co_filename)
        if not is_counting.is_set() or event != "call" or code.co_name.startswith("<"):
            return
        if path.is_relative_to(SERVER):
            found.add((path.name, code.co_name, code.co_firstlineno))

    async def chats() -> str:
        app = new_app(LLM(num_blocks=100), ServerOptions(served_model_name=["tiny"]))
        async with app.router.lifespan_context(app):
            await streamed_chat(app)
            is_counting.set()
            answer = await streamed_chat(app)
            is_counting.clear()
        return answer

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        answer = asyncio.run(chats())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert answer.endswith("data: [DONE]\n\n") and "error" not in answer
    return found


def test_a_streamed_chat_passes_few_functions(passed):
    assert 50 < len(passed) <= MOST_FUNCTIONS, sorted(passed)


def test_the_way_that_is_written_down_is_the_real_one(passed):
    names = {(file, name) for file, name, _ in passed}
    named = []
    file = ""
    for line in re.findall(r"^ {4}(\S.*|  +\w.*)$", gate.__doc__, re.MULTILINE):
        words = re.match(r"(\w+\.py)? +((?:[\w.]+, )*[\w.]+)  ", line)
        assert words is not None, line
        file = words[1] or file
        named += [(file, word.rpartition(".")[2]) for word in words[2].split(", ")]
    assert len(named) >= 10
    for file, name in named:
        name = "__call__" if name in ("Gate", "EventStream") else name
        assert (file, name) in names, (file, name)
