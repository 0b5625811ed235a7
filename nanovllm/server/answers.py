"""Answers: what a call returns, whole or as a stream of events; what all kinds have in common."""

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request, TokenLogprobs
from nanovllm.server.errors import error_of
from nanovllm.server.protocol import Body, StreamOptions
from nanovllm.server.streams import Stream
from nanovllm.server.texts import TokenTexts

encode = json.JSONEncoder(ensure_ascii=False).encode
MANY = 100  # parts of a list
COMMENT = ": the answer is still to come\n\n"  # proxies end streams of which nothing comes
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second one is nginx's
REASONS: dict[Any, str] = {"abort": "stop", "error": "stop"}  # in words that clients know
Rows = list[TokenLogprobs | None]


class Json(str):
    """A text that is JSON already."""


class EventStream(StreamingResponse):
    """Server-sent events. Their generator ends with the response, also if the client leaves."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class Answers(ABC):
    """The answers to one call: several requests, each with n outputs, which are choices."""

    kind: str
    chunk_kind: str
    prefix: str  # of ids
    is_prompt_only = False  # a token is drawn, because the engine draws one, but not shown
    last_event = "data: [DONE]\n\n"  # also of what has failed

    def __init__(self, body: Body, requests: list[Request], model: str, texts: TokenTexts):
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.requests = requests
        self.texts = texts
        self.wants = body.stream_options or StreamOptions()
        self.has_token_ids = bool(body.return_token_ids)
        self.of_prompts: dict[int, Json] = {}
        # tokens streamed, by request and output
        self.counts: Counter[tuple[int, int]] = Counter()
        self.frame = {
            "id": f"{self.prefix}-{body.request_id}" if body.request_id else self.id,
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": body.model or model,
        }
        self.head = encode(self.frame)[:-1] + ', "choices": '  # the same for each event
        self.num_outputs = 0  # tokens, at most
        # log-probabilities and token ids, at most: each choice has those of its prompt
        self.num_entries = 0
        for i, request in enumerate(requests):
            request.request_id = f"{self.id}-{i}"  # a client may give two calls the same id
            params = request.params
            # per token; -1: none are asked for
            scored = -1 if params.prompt_logprobs is None else params.prompt_logprobs
            drawn = -1 if params.logprobs is None else params.logprobs
            of_prompt = self.has_token_ids + scored + 1
            of_output = self.has_token_ids + drawn + 1
            num_prompt = params.n * len(request.prompt_token_ids)
            num_outputs = params.n * request.max_len - num_prompt
            self.num_outputs += num_outputs
            self.num_entries += num_prompt * of_prompt + num_outputs * of_output

    def usage(self, outputs: list[RequestOutput]) -> dict:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        if self.is_prompt_only:
            num_completion = 0
        num_cached = sum(output.num_cached_tokens for output in outputs)
        return {
            **counts_of(num_prompt, num_completion),
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    async def stream(self, stream: Stream) -> AsyncGenerator[str, None]:
        """The answer as it comes. The first item is empty, and says that something has come: an
        error before it is raised, a later one becomes an event."""
        events: list[str] = []
        has_begun = False
        try:
            async for deltas in stream:
                for delta in deltas:
                    if delta.error is not None:
                        raise delta.error
                    for part in delta.parts:
                        events += self.events(delta.index, part)
                if not has_begun:
                    yield ""
                has_begun = True
                if events or not deltas:
                    yield "".join(events) or COMMENT
                events = []
            events = self.last(stream.outputs)
        except Exception as error:
            if not has_begun:
                raise
            events.append(self.error_event(error_of(error)[1]))
        finally:
            stream.close()
        yield "".join([*events, self.last_event])

    def blocks(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """The answer that is not streamed, choice by choice."""
        begin = self.head + "["
        for i, output in enumerate(outputs):
            for one in output.outputs:
                choice = self.choice(i, one, output, is_first=True)
                yield f"{begin}{encoded(choice)}".encode()
                begin = ", "
        yield f"], {encoded(self.end(outputs))[1:]}".encode()

    def end(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """What comes after the choices."""
        return {"usage": self.usage(outputs)}

    def events(self, i: int, part: CompletionOutput) -> list[str]:
        """Events for what is new in an output of request i."""
        key = (i, part.index)
        is_first = key not in self.counts
        self.counts[key] += len(part.token_ids)
        choice = self.choice(i, part, None, is_first)
        usage = None
        if self.wants.continuous_usage_stats:
            num_prompt = sum(len(request.prompt_token_ids) for request in self.requests)
            usage = counts_of(num_prompt, self.counts.total())
        return [self.event(choice, usage=usage)]

    def last(self, outputs: list[RequestOutput]) -> list[str]:
        """Events after the last token."""
        if not self.wants.include_usage:
            return []
        return [self.event(usage=self.usage(outputs))]

    def event(self, *choices: dict, usage: dict | None = None) -> str:
        """A line of a stream."""
        end = "" if usage is None else f', "usage": {encode(usage)}'
        return f"data: {self.head}{encode(choices)}{end}}}\n\n"

    def error_event(self, error: dict) -> str:
        """Tells that the stream has failed."""
        return f"data: {json.dumps(error)}\n\n"

    # --- for each kind ---

    @abstractmethod
    def content(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        """What an output of request i says; or what is new in it, if the whole is not given."""

    # --- parts of a choice ---

    def choice(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        """Choices are numbered prompt by prompt."""
        choice = {
            "index": i * self.requests[i].params.n + one.index,
            **self.content(i, one, whole, is_first),
            "finish_reason": self.reason(one),
            "stop_reason": one.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = one.token_ids
            if is_first:
                choice["prompt_token_ids"] = self.requests[i].prompt_token_ids
        return choice

    def reason(self, one: CompletionOutput) -> str | None:
        """Why an output has ended."""
        return REASONS.get(one.finish_reason, one.finish_reason)

    def prompt_logprobs(self, i: int, output: RequestOutput) -> Json | None:
        """Writes them as vLLM does, once for all choices. The rank of a token that is not among the
        likeliest is not known."""
        if output.prompt_logprobs is None:
            return None
        if i not in self.of_prompts:
            rows = [row and self.ranked(row) for row in output.prompt_logprobs]
            self.of_prompts[i] = Json(encoded(rows))
        return self.of_prompts[i]

    def ranked(self, row: TokenLogprobs) -> dict:
        num_likeliest = self.requests[0].params.prompt_logprobs or 0
        likeliest = sorted(row, key=lambda i: -row[i])
        ranks = {i: rank for rank, i in enumerate(likeliest, 1) if rank <= num_likeliest}
        return {
            str(i): {"logprob": logprob, "rank": ranks.get(i), "decoded_token": self.texts.of(i)}
            for i, logprob in row.items()
        }


def counts_of(num_prompt: int, num_completion: int) -> dict:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def encoded(content: Any) -> str:
    """JSON, made in pieces: between two of them another thread may have the interpreter."""
    if isinstance(content, Json):
        return content
    if isinstance(content, dict):
        parts = [f"{encode(name)}: {encoded(value)}" for name, value in content.items()]
        return "{" + ", ".join(parts) + "}"
    if isinstance(content, list) and len(content) > MANY:
        slices = (content[i : i + MANY] for i in range(0, len(content), MANY))
        return "[" + ", ".join(encode(part)[1:-1] for part in slices) + "]"
    if isinstance(content, list):
        return "[" + ", ".join(map(encoded, content)) + "]"
    return encode(content)
