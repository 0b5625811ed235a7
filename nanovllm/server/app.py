"""App: the routes of the server, who may use them, and how it ends."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from nanovllm.engine import LLM
from nanovllm.options import Options, is_int, is_number, shown
from nanovllm.server.answers import ChatCompletions, Completions, TokenTexts
from nanovllm.server.async_llm import AsyncLLM
from nanovllm.server.calls import Backend
from nanovllm.server.gate import Gate
from nanovllm.server.metrics import Metrics
from nanovllm.server.page import Live, add_page
from nanovllm.server.protocol import (
    BadRequest,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parsed,
)
from nanovllm.server.responses import HANDLERS, Answer

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


@dataclass(kw_only=True)
class ServerOptions(Options):
    model_name: str
    api_key: str | None = None
    max_waiting: int = 256
    max_body_bytes: int = 4 * 2**20
    max_tokens_per_call: int = 2**20
    drain_seconds: float = 30.0
    allowed_origins: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.require("api_key", self.api_key != "", "None, or not empty")
        leasts = {"max_waiting": 0, "max_body_bytes": 1, "max_tokens_per_call": 1}
        for name, low in leasts.items():
            is_allowed = is_int(getattr(self, name), low)
            self.require(name, is_allowed, f"an integer from {low} on")
        is_time = is_number(self.drain_seconds, 0)
        self.require("drain_seconds", is_time, "a number from 0 on")


class Server:
    """What the routes share."""

    def __init__(self, new_engine: Callable[[], Awaitable[Backend]], options: ServerOptions):
        self.new_engine = new_engine
        self.options = options
        self.metrics = Metrics()
        self.started = int(time.time())
        # for one event loop, which does not run yet
        self.engine: Backend
        self.texts: TokenTexts
        self.live: Live  # if the engine is in this process

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.engine = await self.new_engine()
        self.engine.inputs.model = self.options.model_name  # errors name no paths
        self.texts = TokenTexts(deepcopy(self.engine.inputs.tokenizer))
        if isinstance(self.engine, AsyncLLM):
            self.live = Live(self.engine)
        try:
            yield
        finally:
            self.engine.close()
            await self.engine.ended()

    @property
    def max_model_len(self) -> int:
        return self.engine.inputs.scheduler.max_model_len

    def close_views(self) -> None:
        """Ends the connections of watchers, which would never end by themselves."""
        if isinstance(self.engine, AsyncLLM):
            self.live.close()

    # --- bodies become requests ---

    async def read(self, request: Request, kind: type[BaseModel]) -> Any:
        """The body of a request. Raises BadRequest."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise BadRequest("the content type must be application/json", status=415)
        parts = []
        num_bytes = 0
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > self.options.max_body_bytes:
                allowed = f"at most {self.options.max_body_bytes:,} bytes"
                raise BadRequest(f"the body is too long: {allowed} are allowed", status=413)
            parts.append(part)
        body = await self.engine.prepare(parsed, kind, b"".join(parts))
        self.check_model(body.model)
        return body

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.options.model_name):
            raise BadRequest(f"the model {shown(name)} does not exist", "model", 404)

    async def answer(self, request: Request, kind: type[Body], answers: type) -> Answer:
        body = await self.read(request, kind)
        requests = await self.prepare(body, body.requests)
        num_tokens = sum(
            request.params.n * (request.max_len - len(request.prompt_token_ids))
            for request in requests
        )
        most = self.options.max_tokens_per_call
        if num_tokens > most:
            asked = f"prompts * n * max_tokens is {num_tokens:,}"
            raise BadRequest(f"{asked}, at most {most:,} are allowed in one call", "max_tokens")
        made = answers(body, requests, self.options.model_name, self.texts)
        return Answer(self.engine, self.metrics, made, body)

    async def prepare(self, body: BaseModel, function: Callable) -> Any:
        """What a method of the body makes of it, in the thread that tokenizes. Raises
        BadRequest."""
        try:
            return await self.engine.prepare(function, self.engine.inputs)
        except ValueError as error:
            message = str(error)[:1000]
            fields = type(body).model_fields  # sentences begin with the one that is wrong
            names = [name for name in re.findall(r"\w+", message) if name in fields]
            raise BadRequest(message, names[0] if names else None) from error

    # --- routes ---

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, CompletionBody, Completions)

    async def chat_completions(self, request: Request) -> Response:
        return await self.answer(request, ChatBody, ChatCompletions)

    async def models(self) -> dict:
        return {"object": "list", "data": [self.model()]}

    async def one_model(self, name: str) -> dict:
        self.check_model(name)
        return self.model()

    def model(self) -> dict:
        return {
            "id": self.options.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "nanovllm",
            "root": self.options.model_name,
            "parent": None,
            "max_model_len": self.max_model_len,
        }

    async def tokenize(self, request: Request) -> dict:
        body = await self.read(request, TokenizeBody)
        token_ids = await self.prepare(body, body.token_ids)
        longest = self.max_model_len
        return {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids}

    async def detokenize(self, request: Request) -> dict:
        body = await self.read(request, DetokenizeBody)
        return {"prompt": await self.prepare(body, body.text)}

    async def health(self) -> Response:
        self.engine.check_open()
        return Response(status_code=200)

    async def version(self) -> dict:
        return {"version": version("nanovllm")}

    async def show_metrics(self) -> Response:
        stats = await self.engine.stats()
        return Response(self.metrics.text(stats), media_type="text/plain; version=0.0.4")


def new_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The app of a server whose engine is in this process, with its page."""

    async def new_engine() -> Backend:
        return AsyncLLM(llm, options.max_waiting)

    server = Server(new_engine, options)
    app = app_of(server)
    add_page(app, lambda: server.live)
    return app


def app_of(server: Server) -> FastAPI:
    app = FastAPI(
        title="nanovllm",
        version=version("nanovllm"),
        lifespan=server.lifespan,
        docs_url=None,  # its page would come from the network
        redoc_url=None,
    )
    app.state.server = server
    routes: dict[str, Callable] = {
        "/v1/completions": server.completions,
        "/v1/chat/completions": server.chat_completions,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.one_model,
        "/health": server.health,
        "/version": server.version,
        "/metrics": server.show_metrics,
    }
    for path, route in routes.items():
        method = "POST" if path in BODIES else "GET"
        app.add_api_route(path, route, methods=[method], response_model=None)
    app.openapi = lambda: schema_of(app)  # type: ignore[method-assign]
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    options = server.options
    app.add_middleware(Gate, api_key=options.api_key)
    if options.allowed_origins:  # outside of the gate: browsers ask first, without the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def schema_of(app: FastAPI) -> dict:
    """OpenAPI's description of the app, with the bodies, which the routes read themselves."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for path, kind in BODIES.items():
        body = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        components |= body.pop("$defs", {})
        content = {"application/json": {"schema": body}}
        schema["paths"][path]["post"]["requestBody"] = {"content": content, "required": True}
    return schema
