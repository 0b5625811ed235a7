"""Responses: an answer on its way to a client, who may leave at any time; and errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from nanovllm.frontend.outputs import RequestOutput
from nanovllm.schedule import ScheduleError
from nanovllm.server.answers import DONE, Answers
from nanovllm.server.calls import Backend, Busy, Call, News, Unavailable
from nanovllm.server.metrics import Clock, Metrics
from nanovllm.server.protocol import BadRequest, Body

logger = logging.getLogger("uvicorn.error")
T = TypeVar("T")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


def error_of(status: int, message: str, param: str | None = None) -> dict:
    kind = TYPES.get(status, TYPES[400])
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(status: int, message: str, param: str | None = None) -> JSONResponse:
    response = JSONResponse(error_of(status, message, param), status)
    if status in (429, 503):
        response.headers["Retry-After"] = "1"
    return response


def status_of(error: Exception) -> tuple[int, str]:
    """The HTTP status of an error, and what its client is told."""
    if isinstance(error, BadRequest):
        return error.status, str(error)
    if isinstance(error, Busy):
        return 429, str(error)
    if isinstance(error, Unavailable):
        return 503, str(error)
    logger.error("a request failed", exc_info=error)
    if isinstance(error, ScheduleError):  # a sentence for the scheduler's author
        return 500, str(error)
    name = type(error).__name__
    return 500, f"the engine failed on this request ({name}); the server's log says more"


async def answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of a route that does not exist
        response = error_response(error.status_code, str(error.detail).lower())
        response.headers.update(error.headers or {})
        return response
    status, message = status_of(error)
    return error_response(status, message, getattr(error, "param", None))


HANDLERS = {kind: answer_error for kind in (BadRequest, Busy, Unavailable, HTTPException)}


class Answer(Response):
    """Submits the requests of a call and sends what comes."""

    def __init__(self, engine: Backend, metrics: Metrics, answers: Answers, body: Body):
        super().__init__()
        self.engine = engine
        self.clock = Clock(metrics)
        self.answers = answers
        self.is_streamed = bool(body.stream)
        self.usage_is_streamed = body.usage_is_streamed
        self.ended: list[RequestOutput] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.engine.submit(self.answers.requests, self.is_streamed)
        try:
            if self.is_streamed:
                await while_connected(receive, self.stream(call, send))
                return
            whole = await while_connected(receive, self.whole(call))
            if whole is not None:
                await JSONResponse(whole)(scope, receive, send)
        finally:
            self.engine.leave(call)

    async def whole(self, call: Call) -> dict:
        outputs: dict[int, RequestOutput] = {}
        while not call.is_over:
            for news in await call.take():
                if news.error is not None:
                    raise news.error
                if news.output is not None:
                    outputs[news.index] = news.output
                    self.clock.end(news.output)
        return self.answers.whole([outputs[i] for i in sorted(outputs)])

    async def stream(self, call: Call, send: Send) -> None:
        """An error before the first event has a status of its own; later it is an event, the last
        one."""
        has_begun = False
        error: Exception | None = None
        while error is None and not call.is_over:
            events: list[str] = []
            for news in await call.take():
                error = error or news.error
                if news.error is None:
                    events += self.events_of(news)
            if error is not None and not has_begun:
                raise error
            if error is not None:
                events.append(f"data: {json.dumps(error_of(*status_of(error)))}\n\n")
            elif call.is_over and self.usage_is_streamed:
                events.append(self.answers.event(usage=self.answers.usage(self.ended)))
            if error is not None or call.is_over:
                events.append(DONE)
            if not events:
                continue
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            data = "".join(events).encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def events_of(self, news: News) -> list[str]:
        """One for each output that has a new token, or has ended."""
        events = []
        for delta in news.deltas:
            choice = self.answers.index_of(news.index, delta.index)
            if not delta.token_ids and not delta.text and choice in self.clock.ended:
                continue
            self.clock.token(choice, is_last=delta.finish_reason is not None)
            events.append(self.answers.event(self.answers.part(news.index, delta)))
        if news.output is not None:
            self.ended.append(news.output)
            self.clock.end(news.output)
        return events


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None if the client leaves before it is done."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
