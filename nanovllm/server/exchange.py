"""Exchange: a call from its body to its answer. Its client may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from nanovllm.frontend.outputs import RequestOutput
from nanovllm.server.answers import Answers, encoded
from nanovllm.server.calls import Backend, Call, News
from nanovllm.server.errors import error_of
from nanovllm.server.metrics import Metrics
from nanovllm.server.visits import Clock, Visit

T = TypeVar("T")
FEW = 2000  # log-probabilities, which take a few milliseconds
COMMENT = b": the answer is still to come\n\n"  # proxies end streams of which nothing comes
STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # for nginx
]


class Exchange:
    """Submits the requests of a call, and sends what comes."""

    def __init__(self, engine: Backend, metrics: Metrics, visit: Visit, answers: Answers):
        self.engine = engine
        self.metrics = metrics
        self.visit = visit
        self.answers = answers
        self.ended: dict[int, RequestOutput] = {}
        self.error: Exception | None = None
        self.clock = Clock(metrics, visit)
        visit.num_prompt = sum(len(one.prompt_token_ids) for one in answers.requests)

    async def run(self, scope: Scope, receive: Receive, send: Send, is_streamed: bool) -> None:
        call = self.engine.submit(self.answers.requests, is_streamed)
        try:
            if is_streamed:
                await self.stream(call, send)
            else:
                content = await self.whole(call)
                await Response(content, media_type="application/json")(scope, receive, send)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.engine.leave(call)
            reason = "abort" if self.error is None else "error"
            for i, request in enumerate(self.answers.requests):
                if i not in self.ended:
                    self.metrics.count(reason, request.params.n)

    def end(self, news: News) -> None:
        """A request has ended."""
        assert news.output is not None
        self.ended[news.index] = news.output
        self.clock.end(news.output)

    async def whole(self, call: Call) -> str:
        """The answer as JSON. With many log-probabilities the loop does not make it, and no two
        of them are made at a time."""
        while not call.is_over:
            for news in await call.take():
                if news.error is not None:
                    raise news.error
                if news.output is not None:
                    self.end(news)
                    self.clock.tokens(news.output, news.gaps)
                    counts = (len(one.token_ids) for one in news.output.outputs)
                    self.visit.num_output += sum(counts)
        outputs = [self.ended[i] for i in sorted(self.ended)]
        if num_logprobs(outputs) <= FEW:
            return encoded(self.answers.whole(outputs))
        return await self.engine.long.do(lambda inputs: encoded(self.answers.whole(outputs)))

    async def stream(self, call: Call, send: Send) -> None:
        """An error before the first event has a status of its own; later it is an event, the last
        one."""
        has_begun = False
        last = b""
        try:
            async for data in self.parts(call):
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not has_begun:
                raise
            self.error = error
            _, content = error_of(error)
            last = (self.answers.error_event(content) + self.answers.last_event).encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def parts(self, call: Call) -> AsyncIterator[bytes]:
        """What is to be sent. Raises what the engine raised."""
        events = self.answers.first()
        error: Exception | None = None
        while error is None and not call.is_over:
            batch = await call.take()
            for news in batch:
                error = error or news.error
                if news.error is None:
                    events += self.events_of(news)
            if error is None and call.is_over:
                events += self.answers.last([self.ended[i] for i in sorted(self.ended)])
                events.append(self.answers.last_event)
            if events:
                yield "".join(events).encode()
            elif not batch:
                yield COMMENT
            events = []
        if error is not None:
            raise error

    def events_of(self, news: News) -> list[str]:
        """One for each output that has a new token, or has ended."""
        events = []
        for delta in news.deltas:
            choice = self.answers.index_of(news.index, delta.index)
            if not delta.token_ids and not delta.text and choice in self.clock.ended:
                continue
            self.clock.token(choice, is_last=delta.finish_reason is not None)
            self.visit.num_output += len(delta.token_ids)
            events += self.answers.events(news.index, delta)
        if news.output is not None:
            self.end(news)
        return events


def num_logprobs(outputs: list[RequestOutput]) -> int:
    """How many log-probabilities the outputs have."""
    rows = [row for output in outputs for row in output.prompt_logprobs or ()]
    rows += [row for output in outputs for one in output.outputs for row in one.logprobs or ()]
    return sum(map(len, filter(None, rows)))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. Raises ClientDisconnect if the client leaves before it is done."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
