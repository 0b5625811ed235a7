"""Clients of a server with OpenAI's API: many at once, each with a socket of its own, which note
when their tokens come. Only the standard library, so that they cost little.

    python -m tutorials.performance.clients http://127.0.0.1:8000 --clients 8 --tokens 64
"""

import argparse
import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PATIENCE = 300  # seconds for one answer
ANIMALS = "fox owl duck mouse hare mole frog crow goat bear".split()
PLACES = "hill island farm river town forest lake ship".split()


@dataclass(frozen=True)
class Target:
    """A server. `is_streamed` says whether it is asked for streams."""

    url: str
    model: str | None = None
    is_streamed: bool = True
    has_tokenizer: bool = True

    def prompt(self, i: int) -> str | list[int]:
        """All of about one length, and no two of the first eighty alike."""
        return prompt(i) if self.has_tokenizer else [1 + i] * 16


@dataclass
class Answer:
    """Times are by time.perf_counter."""

    begin: float
    times: list[float] = field(default_factory=list)  # of each piece of text
    end: float = 0.0
    num_tokens: int = 0
    status: int = 0  # 0: no answer at all

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begin

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:])]


def first_model(url: str) -> str | None:
    """None for a server that does not tell."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            return json.load(response)["data"][0]["id"]
    except urllib.error.HTTPError:
        return None


def prompt(i: int) -> str:
    place = PLACES[i // len(ANIMALS) % len(PLACES)]
    return f"Once upon a time there was a {ANIMALS[i % len(ANIMALS)]} who lived near a {place}"


async def ask(target: Target, i: int, num_tokens: int, begin: float | None = None) -> Answer:
    """Exactly so many tokens after prompt i. `begin` is when the client wanted to ask."""
    answer = Answer(time.perf_counter() if begin is None else begin)
    body = {"prompt": target.prompt(i), "max_tokens": num_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    if target.model is not None:
        body["model"] = target.model
    if target.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        await asyncio.wait_for(_read(target, body, answer), PATIENCE)
    except (OSError, EOFError, ValueError, IndexError, asyncio.TimeoutError):
        answer.status = 0
    answer.end = time.perf_counter()
    return answer


async def _read(target: Target, body: dict, answer: Answer) -> None:
    data = json.dumps(body).encode()
    url = urlsplit(target.url)
    is_safe = url.scheme == "https"
    port = url.port or (443 if is_safe else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=is_safe or None)
    with closing(writer):
        writer.write(
            f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            "Connection: close\r\n\r\n".encode()
            + data
        )
        answer.status = int((await reader.readline()).split()[1])
        is_chunked = False
        while (line := (await reader.readline()).strip().lower()) != b"":
            is_chunked |= line == b"transfer-encoding: chunked"
        if not target.is_streamed or answer.status != 200:
            whole = b"".join([piece async for piece in _pieces(reader, is_chunked)])
            if answer.status == 200:
                _take(json.loads(whole), answer)
            return
        rest = b""
        async for piece in _pieces(reader, is_chunked):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    _take(json.loads(line[6:]), answer)


async def _pieces(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """The body of an answer as it comes."""
    while is_chunked and (size := int(await reader.readline(), 16)):
        yield (await reader.readexactly(size + 2))[:-2]
    while not is_chunked and (piece := await reader.read(65536)):
        yield piece


def _take(event: dict, answer: Answer) -> None:
    if event.get("choices"):
        answer.times.append(time.perf_counter())
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]


async def at_once(target: Target, num_clients: int, num_tokens: int) -> list[Answer]:
    begin = time.perf_counter()
    asked = [ask(target, i, num_tokens, begin) for i in range(num_clients)]
    return await asyncio.gather(*asked)


async def at_rate(
    target: Target, rate: float, seconds: float, num_tokens: int, seed: int
) -> list[Answer]:
    """Poisson arrivals: each comes when its time has come, whatever has become of the others."""
    random_ = random.Random(seed)
    begin = time.perf_counter() + 0.1

    async def later(i: int, when: float) -> Answer:
        await asyncio.sleep(begin + when - time.perf_counter())
        return await ask(target, i, num_tokens, begin + when)

    arrivals = []
    when = random_.expovariate(rate)
    while when < seconds:
        arrivals.append(when)
        when += random_.expovariate(rate)
    return await asyncio.gather(*(later(i, when) for i, when in enumerate(arrivals)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    url = args.url.rstrip("/").removesuffix("/v1")
    answers = asyncio.run(at_once(Target(url, first_model(url)), args.clients, args.tokens))
    for answer in answers:
        first = f"first after {1e3 * answer.ttft:,.0f} ms" if answer.times else "no answer"
        print(f"status {answer.status}, {answer.num_tokens} tokens, {first}")


if __name__ == "__main__":
    main()
