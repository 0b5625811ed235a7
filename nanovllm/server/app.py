"""App: the routes of the server, and how a body becomes an answer."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from copy import deepcopy
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import StreamingResponse

from nanovllm.engine import LLM
from nanovllm.frontend.inputs import Inputs
from nanovllm.options import shown
from nanovllm.server.answers import HEADERS, Answers, EventStream, encoded
from nanovllm.server.async_llm import AsyncLLM
from nanovllm.server.chats import ChatBody, ChatCompletions, TokenizeBody
from nanovllm.server.completions import CompletionBody, Completions
from nanovllm.server.errors import BadRequest, Busy
from nanovllm.server.gate import Gate, body_of, no_route, while_connected
from nanovllm.server.metrics import Metrics
from nanovllm.server.page import Live, add_page
from nanovllm.server.protocol import DetokenizeBody, in_words, parsed
from nanovllm.server.responses import ResponseBody, Responses
from nanovllm.server.settings import ServerOptions
from nanovllm.server.streams import SHORT, Backend, Lane, Stream, collected
from nanovllm.server.texts import TokenTexts

JSON = "application/json"
# log-probabilities and token ids in an answer
FEW = 2000  # of which JSON is made in a few milliseconds
MOST_ENTRIES = 2**19  # some 40 MB
MOST_UNSENT = 4 * MOST_ENTRIES  # in all answers together
Make = Callable[[Any, Inputs], Iterator]  # from a body


class Server:
    """What the routes share."""

    def __init__(self, new_engine: Callable[[], Awaitable[Backend]], options: ServerOptions):
        self.new_engine = new_engine
        self.options = options
        self.metrics = Metrics(options.served_model_name[0])
        self.started = int(time.time())
        # for one event loop, which does not run yet
        self.engine: Backend
        self.max_model_len: int
        self.texts: TokenTexts
        self.live: Live | None = None  # if the engine is in this process
        self.unsent: WeakSet[Answers] = WeakSet()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.engine = await self.new_engine()
        self.max_model_len = self.engine.inputs.scheduler.max_model_len
        self.texts = TokenTexts(deepcopy(self.engine.inputs.tokenizer))
        if self.options.chat_template is not None:
            for lane in self.engine.lanes:
                lane.inputs.tokenizer.chat_template = self.options.chat_template
        if isinstance(self.engine, AsyncLLM):
            self.live = Live(self.engine)
        try:
            yield
        finally:
            self.engine.close()
            await self.engine.ended()

    # --- bodies become answers ---

    def route(self, kind: type[Any], answers: type[Answers] | None) -> Callable:
        """A route that reads its body itself, since it is too long for the event loop to parse.
        When it has come, the client may leave at any time."""

        async def route(request: Request) -> Response:
            most = self.options.most_bytes(self.max_model_len)
            data = await self.engine.unless_closed(body_of(request, most))
            work = self.answer(request, data, kind, answers) if answers else self.tell(data, kind)
            return await while_connected(request.receive, work)

        return route

    async def answer(
        self, request: Request, data: bytes, kind: type[Any], answers: type[Answers]
    ) -> Response:
        """The answer to a call; of a stream, when something of it has come."""
        first = self.engine.short if len(data) <= SHORT else self.engine.long
        body, *requests = await self.prepare(first, kind, data, kind.requests)
        made = answers(body, requests, self.options.served_model_name[0], self.texts)
        stream = self.submit(request, made, bool(body.stream))
        if body.stream:
            events = made.stream(stream)
            await anext(events)
            return EventStream(events, headers=HEADERS)
        return await self.whole(made, stream)

    async def tell(self, data: bytes, kind: type[Any]) -> Response:
        """What a body and the tokenizer say alone."""

        def told(body: Any, inputs: Inputs) -> Iterator[str]:
            yield encoded(body.told(inputs))

        _, content = await self.prepare(self.engine.told, kind, data, told)
        return Response(content, media_type=JSON)

    async def prepare(self, lane: Lane, kind: type, data: bytes, make: Make) -> list[Any]:
        """A body, and what is made of it one by one, in threads that tokenize: in this lane, or, if
        a form must be compiled, in theirs. Raises BadRequest, Busy or Unavailable."""

        def pieces(inputs: Inputs, body: Any = None) -> Iterator[Any]:
            if body is None:
                body = parsed(kind, data)
                self.check_body(body)
                yield body
                if body.has_form:
                    return
            try:
                yield from make(body, inputs)
            except ValueError as error:
                raise in_words(error, kind) from error

        body, *made = await self.engine.prepare(lane, pieces(lane.inputs))
        if body.has_form:
            forms = self.engine.forms
            made = await self.engine.prepare(forms, pieces(forms.inputs, body))
        return [body, *made]

    def check_body(self, body: Any) -> None:
        self.check_model(body.model)
        if getattr(body, "priority", None) and not self.options.allow_priority:
            problem = f"priority={shown(body.priority)} is not allowed"
            raise BadRequest(f"{problem}: start with --allow-priority", "priority")
        n = getattr(body, "n", None) or 1
        most = max(1, self.engine.inputs.scheduler.max_num_seqs // 2)
        if n > most:
            why = "half of max_num_seqs: it would have to wait for seats, and all others behind it"
            raise BadRequest(f"n={shown(n)} is not allowed: at most {most}, {why}", "n")

    def check_model(self, name: str | None) -> None:
        if name not in (None, *self.options.served_model_name):
            raise BadRequest(f"the model {shown(name)} does not exist", "model", 404)

    def submit(self, request: Request, answers: Answers, is_streamed: bool) -> Stream:
        """Raises BadRequest, Busy or Unavailable."""
        requests = answers.requests
        most = self.options.max_tokens_per_call
        if answers.num_outputs > most:
            problem = f"prompts * n * max_tokens is {answers.num_outputs:,}"
            raise BadRequest(f"{problem}, at most {most:,} are allowed in one call", "max_tokens")
        num_entries = answers.num_entries
        if num_entries > MOST_ENTRIES:
            problem = f"the answer may have {num_entries:,} log-probabilities and token ids"
            raise BadRequest(f"{problem}, at most {MOST_ENTRIES:,} are allowed in one call", "n")
        if num_entries + sum(one.num_entries for one in self.unsent) > MOST_UNSENT:
            raise Busy("too many answers with log-probabilities or token ids are not sent yet")
        self.unsent.add(answers)
        stream = self.engine.submit(requests, is_streamed)
        stream.clock = request.scope["clock"]
        stream.clock.num_prompt = sum(len(one.prompt_token_ids) for one in requests)
        return stream

    async def whole(self, answers: Answers, stream: Stream) -> Response:
        """The answer that is not streamed. With many log-probabilities a thread makes it, block by
        block: in between it makes others."""
        with closing(stream):
            async for _ in stream:
                if stream.error is not None:
                    raise stream.error
        blocks = answers.blocks(stream.outputs)
        if answers.num_entries <= FEW:
            return Response(b"".join(blocks), media_type=JSON)
        made = collected(self.engine.writing.jobs, blocks)
        return StreamingResponse(await self.engine.unless_closed(made), media_type=JSON)

    # --- routes ---

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
            "root": self.options.served_model_name[0],
            "parent": None,
            "max_model_len": self.max_model_len,
        }

    async def health(self) -> Response:
        self.engine.check_open()
        return Response()

    async def version(self) -> dict:
        return {"version": version("nanovllm")}

    async def show_metrics(self) -> Response:
        # without a replica that answers, none waits in an engine
        stats = {"requests_waiting": 0} | await self.engine.stats()
        stats["requests_waiting"] += self.engine.num_preparing
        return Response(self.metrics.text(stats), media_type="text/plain; version=0.0.4")


# what comes in, and what goes out; None: the tokenizer alone answers
POSTS: dict[str, tuple[type[Any], type[Answers] | None]] = {
    "/v1/completions": (CompletionBody, Completions),
    "/v1/chat/completions": (ChatBody, ChatCompletions),
    "/v1/responses": (ResponseBody, Responses),
    "/tokenize": (TokenizeBody, None),
    "/detokenize": (DetokenizeBody, None),
}


def new_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The app of a server whose engine is in this process, with its page."""

    async def new_engine() -> Backend:
        return AsyncLLM(llm, options.max_waiting, options.served_model_name[0])

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
    )
    app.state.server = server
    gets: dict[str, Callable] = {
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.one_model,
        "/health": server.health,
        "/version": server.version,
        "/metrics": server.show_metrics,
    }
    for path, kinds in POSTS.items():
        route = server.route(*kinds)
        app.add_api_route(path, route, methods=["POST"], response_model=None)
    for path, route in gets.items():
        app.add_api_route(path, route, response_model=None)
        app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)
    app.openapi = lambda: schema_of(app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, no_route)  # type: ignore[arg-type]
    options = server.options
    known_paths = {*POSTS, *gets}
    app.add_middleware(Gate, options=options, metrics=server.metrics, known_paths=known_paths)
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
    schema = FastAPI.openapi(app)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for path, (kind, _) in POSTS.items():
        body = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        components |= body.pop("$defs", {})
        content = {"application/json": {"schema": body}}
        schema["paths"][path]["post"]["requestBody"] = {"content": content, "required": True}
    return schema
