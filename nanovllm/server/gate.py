"""Gate: what every HTTP request passes: its id, its API key, its line in the log; its body.

This is the way of a streamed chat, from the socket to the engine and back:

    gate.py       Gate            the key is right, the clock runs; at the end, a line in the log
    app.py        Server.route    the body comes; from now on the client may leave
                  Server.answer   one call after the other, down to the stream and its events
    streams.py    prepare         in another thread, chats.py makes a request of the body
                  submit          a Stream is open for it
    async_llm.py  _begin, _add    through the inbox into the engine's thread
                  _report         after a step: a Delta for each request, in one call to the loop
    streams.py    _deal_out       each Delta goes to its Stream, a few at a time
    answers.py    Answers.stream  `async for deltas in stream`: a Delta becomes an event
                  EventStream     which is sent; however that ends, the Stream is closed

Pure ASGI: other middleware would hide that a client has left.
"""

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Coroutine
from hmac import compare_digest
from typing import Any, TypeVar
from uuid import uuid4

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import BadRequest, error_of
from nanovllm.server.metrics import Clock, Metrics
from nanovllm.server.protocol import LONGEST_ID
from nanovllm.server.settings import ServerOptions

logger = logging.getLogger("uvicorn.error")
T = TypeVar("T")
OPEN_PATHS = {"/health"}
QUIET = {"/health", "/metrics"}  # what probes ask all the time is logged only if it fails
LEFT = 499  # the status, in log and metrics, if the client leaves before its answer begins
SECONDS = 60.0  # for a whole body


class Gate:
    """Asks for an API key, if there are any, and gives each answer the id of its request, also
    those of faults. Counts and logs each request that has ended."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, metrics: Metrics, known_paths: set[str]
    ):
        self.app = app
        self.options = options
        self.metrics = metrics
        self.known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"].rstrip("/") or "/"
        request_id = headers.get("x-request-id", "")[:LONGEST_ID] or uuid4().hex
        clock = Clock(self.metrics)
        status = LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        app = self.app
        if path not in OPEN_PATHS and not self.is_allowed(headers):
            app = error_response(BadRequest("the API key is missing or wrong", status=401))
            # a browser then asks for it: the key is the password, the name may be any
            app.headers["WWW-Authenticate"] = 'Basic realm="nanovllm"'
        try:
            await app({**scope, "path": path, "clock": clock}, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            if status != LEFT:  # the answer has begun
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self.note(scope["method"], path, status, clock, request_id)

    def is_allowed(self, headers: Headers) -> bool:
        if not self.options.api_key:
            return True
        header = headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        scheme, _, given = header.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        # all of them, so that the time does not say which
        return sum(compare_digest(given, key.encode()) for key in self.options.api_key) > 0

    def note(self, method: str, path: str, status: int, clock: Clock, request_id: str) -> None:
        """Counts and logs a request that has ended."""
        name = path if path in self.known_paths else "other"  # or each typo is a new series
        self.metrics.responses.labels(name, status).inc()
        if self.options.log_requests and (path not in QUIET or status != 200):
            tokens = ""
            if clock.num_prompt:
                tokens = f" {clock.num_prompt} tokens in, {clock.num_output} out,"
            what = f"{method} {path[:200]!r} {status}"
            seconds = time.perf_counter() - clock.begin
            logger.info("%s:%s %.3f s, id %r", what, tokens, seconds, request_id)


def error_response(error: Exception) -> JSONResponse:
    status, content = error_of(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(content, status, headers)


async def no_route(request: Request, error: HTTPException) -> Response:
    """The answer for a path or a method that does not exist."""
    problem = BadRequest(str(error.detail).lower(), status=error.status_code)
    response = error_response(problem)
    response.headers.update(error.headers or {})
    return response


async def body_of(request: Request, most_bytes: int) -> bytes:
    """Raises BadRequest or ClientDisconnect."""
    if "upgrade" in request.headers:  # its body would be lost
        raise BadRequest("there is no upgrade here: send it as HTTP/1.1, without that header")
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the content type must be application/json", status=415)
    body = bytearray()
    try:
        with anyio.fail_after(SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    allowed = f"at most {most_bytes:,} bytes are allowed (--max-body-bytes)"
                    raise BadRequest(f"the body is too long: {allowed}", status=413)
    except TimeoutError as error:
        raise BadRequest(f"the body has not come within {SECONDS:g} s", status=408) from error
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. Raises ClientDisconnect if the client leaves before it is done."""

    async def until_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()
