"""App: the routes of the server, and how a body becomes an answer.

This is the way of a streamed chat, from the socket to the engine and back:

    app.py        Gate            the key is right, the body is not too long
                  check_body      the body does not have too many values
                  chat            FastAPI has made a ChatBody of the JSON
                  answer          in another thread, chats.py makes a request of the body
    async_llm.py  stream, _add    through the inbox into the engine's thread
                  _report         after a step: a Delta for each request, in one call to the loop
                  _deliver        each Delta goes into the queue of its call
    metrics.py    watched         the times of its tokens are noted
    answers.py    stream          a Delta becomes an event
                  EventStream     which is sent; however that ends, the generators are closed
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from hmac import compare_digest
from importlib.metadata import version
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as NoRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.engine import LLM
from nanovllm.options import shown
from nanovllm.processing.inputs import Inputs
from nanovllm.topics.decoding.structured import prepare_vocabulary
from nanovllm.topics.server.answers import HEADERS, Answers, Deltas, EventStream, TokenTexts
from nanovllm.topics.server.async_llm import AsyncLLM, Backend
from nanovllm.topics.server.chats import ChatBody, ChatCompletions, TokenizeBody
from nanovllm.topics.server.completions import MOST_PROMPTS, CompletionBody, Completions
from nanovllm.topics.server.errors import Refused, answer_to, in_words
from nanovllm.topics.server.metrics import Metrics
from nanovllm.topics.server.page import WITHOUT_KEY, Live, add_page
from nanovllm.topics.server.protocol import BYTES_OF_A_VALUE, DetokenizeBody, check_values
from nanovllm.topics.server.settings import ServerOptions
from nanovllm.topics.server.tool_forms import form_of

logger = logging.getLogger("uvicorn.error")
ID = "X-Request-Id"
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # names of this machine


class Gate:
    """Checks the Host and the API key, if the server has keys, refuses a body that is too long, and
    logs each call. It is pure ASGI: other middleware would hide that a client has left."""

    def __init__(self, app: ASGIApp, server: "Server"):
        self.app = app
        self.server = server
        self.options = server.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin = time.perf_counter()
        headers = Headers(scope=scope)
        told: dict[str, Any] = {"status": 499, "id": headers.get("x-request-id", "")}
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            most = self.options.max_body_bytes
            if num_bytes > most:
                allowed = f"at most {most:,} bytes are allowed (--max-body-bytes)"
                raise HTTPException(413, f"the body is too long: {allowed}")
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                told.update(status=message["status"], id=told["id"] or answer.get(ID, ""))
                if told["id"]:
                    answer[ID] = told["id"]
            await send(message)

        try:
            # a request line may have a whole URL (RFC 9112, section 3.2.2)
            scope["path"] = re.sub(r"^https?://[^/]*", "", scope["path"])
            self.check_host(headers)
            if not (scope["path"] in WITHOUT_KEY or self.is_allowed(headers)):
                raise Refused("the API key is missing or wrong", status=401)
        except Refused as error:
            response = await answer_to(None, error)
            await response(scope, receive, send_with_id)
        else:
            await self.app(scope, receive_some, send_with_id)
        finally:
            if self.options.log_requests:
                self.log(scope, told, time.perf_counter() - begin)

    def log(self, scope: Scope, told: dict, seconds: float) -> None:
        """Logs a call once its answer has ended, without the query: it may have secrets."""
        host, port = scope["client"] or ("-", 0)
        what = f"{host}:{port} {scope['method']} {quote(scope['path'])} {told['status']}"
        logger.info("%s in %.3f s, id %s", what, seconds, ascii(told["id"])[1:-1] or "-")

    def check_host(self, headers: Headers) -> None:
        """Raises Refused if this server for one machine was called by another name."""
        host = re.sub(r":\d*$", "", headers.get("host", "").lower())
        is_named = "host" in headers  # health checks by HTTP/1.0 have none, browsers always
        if self.server.hosts and is_named and host not in self.server.hosts:
            allowed = f"without a key, a server for this machine is called {shown(LOCAL)}"
            hint = "start with --api-key, or let your proxy send one of these names"
            raise Refused(f"Host={shown(host)} is not allowed: {allowed}. {hint}")

    def is_allowed(self, headers: Headers) -> bool:
        if not self.options.api_key:
            return True
        header = headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        scheme, _, given = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # compares all keys, so that the time does not tell which one is right
        return sum(compare_digest(given, key.encode()) for key in self.options.api_key) > 0


class Server:
    """What all routes share."""

    def __init__(self, new_engine: Callable[[], Awaitable[Backend]], options: ServerOptions):
        self.new_engine = new_engine
        self.options = options
        self.name = options.served_model_name[0]
        self.metrics = Metrics(self.name)
        self.started = int(time.time())
        self.hosts: set[str] = set()  # names that the server answers to; empty: to all
        self.tokenizing = ThreadPoolExecutor(1, "tokenizing")
        # each client has at most one call in this thread's queue: so clients take turns
        self.turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # for one event loop, which does not run yet
        self.engine: Backend
        self.inputs: Inputs  # of the thread that tokenizes: threads cannot share a tokenizer
        self.texts: TokenTexts
        self.live: Live | None = None  # if the engine is in this process

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.engine = await self.new_engine()
        inputs = self.engine.inputs
        self.texts = TokenTexts(deepcopy(inputs.tokenizer))
        # errors name no paths
        self.inputs = replace(inputs, tokenizer=deepcopy(inputs.tokenizer), model=self.name)
        if self.options.chat_template is not None:
            self.inputs.tokenizer.chat_template = self.options.chat_template
        prepare_vocabulary(self.inputs)
        self.inputs.tool_form = form_of(self.inputs.tokenizer)
        if self.inputs.tokenizer and self.inputs.tokenizer.chat_template:
            self.inputs.tool_form.log(logger)
        if isinstance(self.engine, AsyncLLM):
            self.live = Live(self.engine)
        try:
            yield
        finally:
            self.engine.close()
            self.tokenizing.shutdown(wait=False, cancel_futures=True)
            await self.engine.ended()

    # --- bodies become answers ---

    async def answer(self, call: Request, body: Any, kind: type[Answers]) -> Response:
        begin = time.perf_counter()
        self.check_model(body.model)
        body.request_id = body.request_id or call.headers.get(ID)
        requests = await self.prepared(lambda: [*body.requests(self.inputs)], body, call)
        for request in requests:
            request.client = self.client_of(call)
        answers = kind(body, requests, self.inputs, self.texts)
        is_streamed = body.stream
        name = {ID: quote(str(answers.frame["id"]))}
        # FastAPI keeps both until the answer has ended, and they may be large
        (await call.json()).clear()
        vars(body).clear()
        deltas: Deltas = self.engine.stream(requests, is_streamed)
        deltas = self.metrics.watched(deltas, requests, begin)
        if is_streamed:
            events = answers.stream(deltas)
            await anext(events)  # an error before the first event has a status of its own
            return EventStream(events, headers=HEADERS | name)
        outputs: list[Any] = [None] * len(requests)
        async with aclosing(deltas):
            async for i, delta in deltas:
                outputs[i] = delta.output or outputs[i]
        # many log-probabilities would stop the event loop
        whole = await asyncio.to_thread(answers.whole, outputs)
        return Response(whole, headers=name, media_type="application/json")

    async def told(self, body: Any, call: Request) -> dict:
        """The answer to a tokenize or detokenize call. Raises ValueError or Refused."""
        self.check_model(body.model)
        if self.inputs.tokenizer is None:
            raise Refused("the model has no tokenizer", status=501)
        return await self.prepared(lambda: body.told(self.inputs), body, call)

    async def prepared(self, function: Callable, body: Any, call: Request) -> Any:
        """Calls a function in the thread that tokenizes, when it is this client's turn: it may take
        longer than a stream can wait. Until it returns, the call counts as a waiting request."""
        client = self.client_of(call)
        self.engine.check_open()
        self.engine.check_room(1, client)
        self.engine.preparing[client] += 1
        try:
            async with self.turns.setdefault(client, asyncio.Lock()):
                return await self.engine.loop.run_in_executor(self.tokenizing, function)
        except ValueError as error:
            raise in_words(error, body) from error
        finally:
            self.engine.preparing -= Counter([client])  # forgets those that have none

    def client_of(self, call: Request) -> str:
        """What stands for the client: its key, or else its address."""
        if self.options.api_key:
            return call.headers["authorization"].partition(" ")[2]
        return call.client.host if call.client else ""

    def check_model(self, name: str | None) -> None:
        if name not in (None, *self.options.served_model_name):
            raise Refused(f"the model {shown(name)} does not exist", "model", 404)

    async def check_body(self, call: Request) -> None:
        """Called before FastAPI makes a body. Raises Refused if the JSON has too many values."""
        with suppress(ValueError, RecursionError):  # no JSON: FastAPI says so
            body = await call.json()
            if isinstance(body, dict):
                most = self.engine.inputs.scheduler.max_model_len
                most *= MOST_PROMPTS if "prompt" in body else 1
                check_values(body, most + self.options.max_body_bytes // BYTES_OF_A_VALUE)

    # --- routes ---

    async def completions(self, body: CompletionBody, call: Request) -> Response:
        return await while_connected(call, self.answer(call, body, Completions))

    async def chat(self, body: ChatBody, call: Request) -> Response:
        return await while_connected(call, self.answer(call, body, ChatCompletions))

    async def tokenize(self, body: TokenizeBody, call: Request) -> dict:
        return await self.told(body, call)

    async def detokenize(self, body: DetokenizeBody, call: Request) -> dict:
        return await self.told(body, call)

    async def models(self) -> dict:
        models = [self.model(name) for name in self.options.served_model_name]
        return {"object": "list", "data": models}

    async def one_model(self, name: str) -> dict:
        self.check_model(name)
        return self.model(name)

    def model(self, name: str) -> dict:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "nanovllm",
            "root": self.name,
            "max_model_len": self.engine.inputs.scheduler.max_model_len,
        }

    async def health(self) -> Response:
        self.engine.check_open()
        return Response()

    async def version(self) -> dict:
        return {"version": version("nanovllm")}

    async def show_metrics(self) -> Response:
        # without a replica that answers, none waits in an engine
        stats = {"outputs_waiting": 0} | await self.engine.stats()
        stats["outputs_waiting"] += self.engine.preparing.total()
        return Response(self.metrics.text(stats), media_type="text/plain; version=0.0.4")


async def while_connected(call: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns the result of a task. It cancels the task if the client leaves first."""

    async def until_disconnect() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=499)
    finally:
        leaving.cancel()
        working.cancel()


def new_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The app of a server whose engine is in this process, with its page."""

    async def new_engine() -> Backend:
        return AsyncLLM(llm, options.max_waiting)

    app = app_of(Server(new_engine, options))
    add_page(app)
    return app


def app_of(server: Server) -> FastAPI:
    app = FastAPI(
        title="nanovllm",
        version=version("nanovllm"),
        lifespan=server.lifespan,
        docs_url=None,  # its page would come from the network
        redoc_url=None,
        openapi_url=None,  # it would be written for each call
    )
    app.state.server = server
    posts: dict[str, Callable] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    gets: dict[str, Callable] = {
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.one_model,
        "/health": server.health,
        "/version": server.version,
        "/metrics": server.show_metrics,
    }
    for path, route in posts.items():
        checks = [Depends(server.check_body)]
        app.add_api_route(path, route, methods=["POST"], response_model=None, dependencies=checks)
    for path, route in gets.items():
        app.add_api_route(path, route, response_model=None)
    # as load balancers ask
    app.add_api_route("/health", server.health, methods=["HEAD"], include_in_schema=False)
    schema = cache(lambda: JSONResponse(app.openapi()))
    app.add_api_route("/openapi.json", schema, response_model=None, include_in_schema=False)
    for kind in (Refused, NoRoute, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer_to)
    app.add_middleware(Gate, server=server)
    if server.options.allowed_origins:  # outside of the gate: browsers ask first, without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app
