"""Answers: what a call returns, whole or as events. Completions and chats share it."""

import json
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from typing import Any
from uuid import uuid4

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm.processing.inputs import Inputs
from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request, TokenLogprobs
from nanovllm.topics.server.async_llm import Delta
from nanovllm.topics.server.errors import Refused, content_of
from nanovllm.topics.server.protocol import Body, StreamOptions

encode = json.JSONEncoder(ensure_ascii=False).encode
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second one is nginx's
REASONS: dict[Any, str] = {"abort": "stop", "error": "stop"}  # in words that clients know
MOST_ENTRIES = 2**19  # log-probabilities in an answer: about 40 MB
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}  # in vocabularies as GPT-2's
LAST_EVENT = "data: [DONE]\n\n"  # also of a stream that failed
UNKNOWN = "\ufffd"  # what a tokenizer writes for a part of a character
Rows = list[TokenLogprobs | None]
Deltas = AsyncGenerator[tuple[int, Delta], None]


class EventStream(StreamingResponse):
    """A response of server-sent events. However it ends, it closes their generator."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


class TokenTexts:
    """The text of single tokens, by a tokenizer of its own: several threads decode with it."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.of = lru_cache(100_000)(lambda token_id: self.of_all([token_id]))
        self.bytes_of = lru_cache(100_000)(self._bytes_of)

    def of_all(self, token_ids: list[int]) -> str:
        """A character may have several tokens."""
        if self.tokenizer is None:
            return "".join(f"token_id:{i}" for i in token_ids)
        return self.tokenizer.decode(token_ids)

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps a part of a character. Those of all tokens are the text."""
        text = self.of(token_id)
        if UNKNOWN not in text:
            return text.encode()
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if all(char in BYTES for char in token):
            return bytes(BYTES[char] for char in token)
        return text.encode()

    def name_of(self, token_id: int) -> str:
        """The token's text. For a part of a character: its bytes, in the form that OpenAI uses."""
        text = self.of(token_id)
        if UNKNOWN not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))


class Answers(ABC):
    """The answers to one call: of several requests, each with n outputs, its choices."""

    kind: str
    chunk_kind: str
    prefix: str  # of ids
    is_prompt_only = False  # a token is sampled, because the engine samples one, but not shown

    def __init__(self, body: Body, requests: list[Request], inputs: Inputs, texts: TokenTexts):
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.requests = requests
        self.texts = texts
        self.wants = body.stream_options or StreamOptions()
        # tokens streamed, by request and output
        self.counts: Counter[tuple[int, int]] = Counter()
        self.frame = {
            "id": f"{self.prefix}-{body.request_id}" if body.request_id else self.id,
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": body.model or inputs.model,
        }
        for i, request in enumerate(requests):
            request.request_id = f"{self.id}-{i}"  # a client may give two calls the same id
        self.check_size()

    def check_size(self) -> None:
        """Raises Refused if the answer may contain too many log-probabilities."""
        num_entries = 0
        for request in self.requests:
            params = request.params
            num_prompt = len(request.prompt_token_ids)
            if params.prompt_logprobs is not None:
                num_entries += params.n * num_prompt * (params.prompt_logprobs + 1)
            if params.logprobs is not None:
                num_entries += params.n * (request.max_len - num_prompt) * (params.logprobs + 1)
        if num_entries > MOST_ENTRIES:
            problem = f"the answer may have {num_entries:,} log-probabilities"
            raise Refused(f"{problem}, at most {MOST_ENTRIES:,} are allowed in one call", "n")

    # --- the whole answer ---

    def whole(self, outputs: list[RequestOutput]) -> str:
        """The JSON of an answer that is not streamed. Each choice is encoded by a call of its own,
        so that other threads run in between."""
        choices = [
            encode(self.choice(i, one, output, is_first=True))
            for i, output in enumerate(outputs)
            for one in output.outputs
        ]
        head = encode(self.frame)[:-1]
        usage = encode(self.usage(outputs))
        return f'{head}, "choices": [{", ".join(choices)}], "usage": {usage}}}'

    def usage(self, outputs: list[RequestOutput]) -> dict:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        usage = counts_of(num_prompt, 0 if self.is_prompt_only else num_output)
        return {**usage, "prompt_tokens_details": {"cached_tokens": num_cached}}

    # --- as a stream ---

    async def stream(self, deltas: Deltas) -> AsyncIterator[str]:
        """Yields the events of an answer. The first item is empty: it says that the request has
        started. An error before it is raised; a later error becomes an event."""
        outputs: list[Any] = [None] * len(self.requests)
        has_begun = False
        try:
            async with aclosing(deltas):
                async for i, delta in deltas:
                    if not has_begun:
                        yield ""
                    has_begun = True
                    outputs[i] = delta.output or outputs[i]
                    events = [event for part in delta.parts for event in self.events(i, part)]
                    if events:
                        yield "".join(events)
                    elif delta == Delta():
                        yield ": waiting\n\n"
            events = self.last(outputs)
        except Refused as error:
            if not has_begun:
                raise
            events = [data(content_of(error))]
        yield "".join([*events, LAST_EVENT])

    def events(self, i: int, part: CompletionOutput) -> list[str]:
        """The events for new tokens in an output of request i."""
        key = (i, part.index)
        is_first = key not in self.counts
        self.counts[key] += len(part.token_ids)
        event = {**self.frame, "choices": [self.choice(i, part, None, is_first)]}
        if self.wants.include_usage and self.wants.continuous_usage_stats:
            num_prompt = sum(len(request.prompt_token_ids) for request in self.requests)
            event["usage"] = counts_of(num_prompt, self.counts.total())
        return [data(event)]

    def last(self, outputs: list[RequestOutput]) -> list[str]:
        """The events after the last token."""
        if not self.wants.include_usage:
            return []
        return [data({**self.frame, "choices": [], "usage": self.usage(outputs)})]

    # --- parts of a choice ---

    @abstractmethod
    def content(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        """The text of an output of request i. With `whole` False: only the new text."""

    def choice(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        """One choice. Choices are numbered prompt by prompt."""
        return {
            "index": i * self.requests[i].params.n + one.index,
            **self.content(i, one, whole, is_first),
            "finish_reason": self.reason(one),
            "stop_reason": one.stop_reason,
        }

    def reason(self, one: CompletionOutput) -> str | None:
        """The reason why an output has ended (`finish_reason`)."""
        return REASONS.get(one.finish_reason, one.finish_reason)


def data(event: dict) -> str:
    """One `data:` line of a stream."""
    return f"data: {encode(event)}\n\n"


def counts_of(num_prompt: int, num_output: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
