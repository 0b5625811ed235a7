"""The clients that measure servers: they read a stream however it falls apart, and count what has come.

Run: pytest tests/server/test_clients.py
"""

import argparse
import asyncio

import pytest

from tutorials.performance import clients, serving
from tutorials.performance.clients import Answer, Target

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b'{"choices": [{"text": "four"}], "usage": {"completion_tokens": 4}}'
EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [{"text": "b"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


def chunks(data: bytes, size: int) -> bytes:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def asked(answer: bytes, is_streamed: bool = True) -> Answer:
    """What a client makes of a server that says this and hangs up."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await clients.ask(Target(f"http://127.0.0.1:{port}", "m", is_streamed), 0, 2)

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_a_stream_in_pieces_of_any_size(size):
    answer = asked(CHUNKED + chunks(EVENTS, size))
    assert (answer.status, answer.num_tokens, len(answer.times), len(answer.gaps)) == (200, 2, 2, 1)
    assert answer.begin < answer.times[0] <= answer.times[1] <= answer.end


def test_a_whole_answer_comes_at_once():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE)
    answer = asked(head + WHOLE, is_streamed=False)
    assert (answer.status, answer.num_tokens, len(answer.times)) == (200, 4, 1)


def test_who_is_refused_and_who_gets_nothing():
    refused = asked(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}")
    assert (refused.status, refused.times) == (429, [])
    for end in (60, 44, 0):
        cut = asked(CHUNKED + chunks(EVENTS, 40)[:end])
        assert cut.status == 0
    assert asked(b"").status == 0
    nobody = asyncio.run(clients.ask(Target("http://127.0.0.1:1"), 0, 2))
    assert nobody.status == 0
    numbers = serving.numbers_of([refused, cut, nobody])
    assert numbers == {"requests": 3, "refused": 1, "failed": 2}


def test_numbers_of_answers():
    answers = [
        Answer(0.0, [1.0, 2.0, 4.0], 4.0, num_tokens=3, status=200),
        Answer(1.0, [4.0], 5.0, num_tokens=7, status=200),
    ]
    numbers = serving.numbers_of(answers)
    assert numbers["output_tokens_per_second"] == 10 / 5
    assert (numbers["ttft_p50"], numbers["latency_p50"], numbers["gap_p50"]) == (2.0, 4.0, 1.5)
    assert serving.median([{"x": 1.0}, {"x": 9.0}, {"x": 2.0}]) == {"x": 2.0}


def test_prompts_differ():
    assert len({clients.prompt(i) for i in range(80)}) == 80
    without_tokenizer = Target("", has_tokenizer=False)
    assert len({tuple(without_tokenizer.prompt(i)) for i in range(80)}) == 80


def test_an_url_has_a_name():
    assert serving.named_url("a=http://x:1") == ("a", "http://x:1")
    for wrong in ("http://x:1", "a=x:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=http"):
            serving.named_url(wrong)
