"""Answers: what a call returns, whole or as a stream of events, in OpenAI's words."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from functools import cached_property, lru_cache
from typing import Any
from uuid import uuid4

from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request, TokenLogprobs
from nanovllm.server.parsing import Parser, Parts
from nanovllm.server.protocol import Body, ChatBody, CompletionBody

encode = json.JSONEncoder(ensure_ascii=False).encode
DONE = "data: [DONE]\n\n"
Rows = list[TokenLogprobs | None]


class TokenTexts:
    """The text of tokens, with a tokenizer that only the event loop's thread uses."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.of = lru_cache(100_000)(self._of)

    def _of(self, token_id: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id])

    def of_all(self, token_ids: list[int]) -> str:
        """A character may have several tokens."""
        if self.tokenizer is None:
            return "".join(map(self.of, token_ids))
        return self.tokenizer.decode(token_ids)


class Answers(ABC):
    """The answers to one call: several requests, each with n outputs, the choices."""

    kind: str
    prefix: str
    is_prompt_only = False  # a token is drawn, because the engine draws one, but not shown

    def __init__(self, body: Body, requests: list[Request], model: str, texts: TokenTexts):
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.requests = requests
        self.texts = texts
        self.frame = {
            "id": self.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        for i, request in enumerate(requests):
            request.request_id = f"{self.id}-{i}"

    @cached_property
    def head(self) -> str:
        """The frame as JSON, up to its choices: the same for each event."""
        return encode(self.frame)[:-1] + ', "choices": '

    def index_of(self, request_index: int, output_index: int) -> int:
        """Choices are numbered prompt by prompt."""
        return request_index * self.requests[request_index].params.n + output_index

    def whole(self, outputs: list[RequestOutput]) -> dict:
        choices = [
            self.choice(i, output, one)
            for i, output in enumerate(outputs)
            for one in output.outputs
        ]
        return {**self.frame, "choices": choices, "usage": self.usage(outputs)}

    def usage(self, outputs: list[RequestOutput]) -> dict:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        if self.is_prompt_only:
            num_completion = 0
        num_cached = sum(output.num_cached_tokens for output in outputs)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def event(self, *choices: dict, usage: dict | None = None) -> str:
        """A line of a stream."""
        end = "" if usage is None else f', "usage": {encode(usage)}'
        return f"data: {self.head}{encode(choices)}{end}}}\n\n"

    @abstractmethod
    def choice(self, i: int, output: RequestOutput, one: CompletionOutput) -> dict:
        """A whole output of request i."""

    @abstractmethod
    def part(self, i: int, delta: CompletionOutput) -> dict:
        """What is new in an output of request i."""

    def reason(self, index: int, reason: str | None) -> str | None:
        """Why a choice has ended, in words that clients know."""
        return {"abort": "stop", "error": "stop"}.get(str(reason), reason)


class Completions(Answers):
    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, requests: list[Request], *args):
        super().__init__(body, requests, *args)
        self.has_echo = bool(body.echo)
        self.is_prompt_only = self.has_echo and body.max_tokens == 0
        self.begun: set[int] = set()  # choices whose prompt has been echoed
        self.num_chars: Counter[int] = Counter()  # of the tokens streamed, by choice

    def echo(self, i: int) -> str:
        request = self.requests[i]
        if request.prompt is not None:
            return request.prompt
        return self.texts.of_all(request.prompt_token_ids)

    def choice(self, i: int, output: RequestOutput, one: CompletionOutput) -> dict:
        text = one.text
        token_ids = one.token_ids
        rows: Rows = [*(one.logprobs or [])]
        if self.is_prompt_only:
            text = ""
            token_ids = []
            rows = []
        if self.has_echo:
            text = self.echo(i) + text
            token_ids = output.prompt_token_ids + token_ids
            rows = (output.prompt_logprobs or []) + rows
        logprobs = None if one.logprobs is None else self.logprobs(token_ids, rows)
        index = self.index_of(i, one.index)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.reason(index, one.finish_reason),
            "stop_reason": one.stop_reason,
            "prompt_logprobs": output.prompt_logprobs if not self.has_echo else None,
        }

    def part(self, i: int, delta: CompletionOutput) -> dict:
        index = self.index_of(i, delta.index)
        text = "" if self.is_prompt_only else delta.text
        if self.has_echo and index not in self.begun:
            self.begun.add(index)
            text = self.echo(i) + text
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self.logprobs(delta.token_ids, [*delta.logprobs], self.num_chars[index])
            self.num_chars[index] += sum(map(len, logprobs["tokens"]))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.reason(index, delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }

    def logprobs(self, token_ids: list[int], rows: Rows, offset: int = 0) -> dict:
        texts = [*map(self.texts.of, token_ids)]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        of_token: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token_id, row in zip(token_ids, rows):
            if row is None:  # the first token of a prompt has none
                of_token.append(None)
                top.append(None)
                continue
            of_token.append(row[token_id])
            top.append({self.texts.of(j): logprob for j, logprob in row.items()})
        return {
            "tokens": texts,
            "token_logprobs": of_token,
            "top_logprobs": top,
            "text_offset": offsets[:-1],
        }


class ChatCompletions(Answers):
    kind = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, requests: list[Request], *args):
        super().__init__(body, requests, *args)
        (request,) = requests
        n = request.params.n
        self.parsers = [Parser(request.prompt, body.has_tools) for _ in range(n)]
        self.begun: set[int] = set()
        if body.stream:
            self.frame["object"] = "chat.completion.chunk"

    def whole(self, outputs: list[RequestOutput]) -> dict:
        return {**super().whole(outputs), "prompt_logprobs": outputs[0].prompt_logprobs}

    def reason(self, index: int, reason: str | None) -> str | None:
        if reason == "stop" and self.parsers[index].num_calls:
            return "tool_calls"
        return super().reason(index, reason)

    def choice(self, i: int, output: RequestOutput, one: CompletionOutput) -> dict:
        parser = self.parsers[one.index]
        parts = parser.add(one.text) + parser.end()
        message: dict[str, Any] = {"role": "assistant", **words(parts)}
        message["content"] = parts.content or (None if parts.tool_calls else "")
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"}
            for call in parts.tool_calls
        ]
        if not message["tool_calls"]:
            del message["tool_calls"]
        return {
            "index": one.index,
            "message": message,
            "logprobs": self.logprobs(one.token_ids, one.logprobs),
            "finish_reason": self.reason(one.index, one.finish_reason),
            "stop_reason": one.stop_reason,
        }

    def part(self, i: int, delta: CompletionOutput) -> dict:
        parser = self.parsers[delta.index]
        parts = parser.add(delta.text)
        if delta.finish_reason is not None:
            parts += parser.end()
        new: dict[str, Any] = words(parts)
        if delta.index not in self.begun:
            self.begun.add(delta.index)
            new["role"] = "assistant"
        return {
            "index": delta.index,
            "delta": new,
            "logprobs": self.logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": self.reason(delta.index, delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }

    def logprobs(
        self, token_ids: list[int], rows: list[TokenLogprobs] | None
    ) -> dict[str, list] | None:
        if rows is None:
            return None
        content = []
        for token_id, row in zip(token_ids, rows):
            entry: dict[str, Any] = self._entry(token_id, row[token_id])
            likeliest = sorted(row.items(), key=lambda item: -item[1])
            num_wanted = self.requests[0].params.logprobs
            entry["top_logprobs"] = [self._entry(*item) for item in likeliest[:num_wanted]]
            content.append(entry)
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.texts.of(token_id)
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}


def words(parts: Parts) -> dict[str, Any]:
    """The fields of a message. Some clients know reasoning by its older name."""
    fields: dict[str, Any] = {"content": parts.content}
    if parts.reasoning:
        fields["reasoning"] = parts.reasoning
        fields["reasoning_content"] = parts.reasoning
    if parts.tool_calls:
        fields["tool_calls"] = parts.tool_calls
    return fields
