"""Completions: the bodies and answers of /v1/completions."""

from collections.abc import Iterator
from typing import Any

from pydantic import SkipValidation

from nanovllm.processing.inputs import Inputs
from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request
from nanovllm.topics.server.answers import Answers, Rows
from nanovllm.topics.server.errors import Refused
from nanovllm.topics.server.protocol import Body

MOST_PROMPTS = 64


class CompletionBody(Body):
    # the engine's inputs check each prompt: pydantic would try four kinds for each token id
    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[Any]:
        """Raises Refused."""
        prompt: Any = self.prompt
        if not isinstance(prompt, str | list):
            raise Refused("prompt must be text, a list of texts, or token ids", "prompt")
        if isinstance(prompt, str) or (prompt and not isinstance(prompt[0], str | list)):
            return [prompt]
        if not 0 < len(prompt) <= MOST_PROMPTS:
            allowed = f"a call must have 1 to {MOST_PROMPTS}"
            raise Refused(f"prompt has {len(prompt):,} prompts: {allowed}", "prompt")
        return prompt

    def requests(self, inputs: Inputs) -> Iterator[Request]:
        """Raises ValueError or Refused."""
        if self.echo and self.logprobs is not None and self.stream:
            raise Refused("echo with logprobs cannot be streamed", "echo")
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = self.logprobs
        # 16 is OpenAI's default; with echo, 0 asks for the prompt only
        more["max_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        if self.echo and self.max_tokens == 0:
            more["max_tokens"] = 1
        params = self.params(inputs.default_params, **more)
        for prompt in self.prompts():
            if isinstance(prompt, str) and not self.add_special_tokens:
                prompt = inputs.tokens(prompt, add_special_tokens=False)
            yield inputs.request(prompt, params)


class Completions(Answers):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, requests: list[Request], *args):
        super().__init__(body, requests, *args)
        self.is_echo = body.echo
        self.is_prompt_only = body.echo and body.max_tokens == 0

    def echo(self, i: int) -> str:
        request = self.requests[i]
        if request.prompt is not None:
            return request.prompt
        return self.texts.of_all(request.prompt_token_ids)

    def content(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        text = one.text
        token_ids = one.token_ids
        rows: Rows = [*(one.logprobs or [])]
        if self.is_prompt_only:
            text = ""
            token_ids = []
            rows = []
        if self.is_echo and is_first:
            text = self.echo(i) + text
        if self.is_echo and whole is not None:  # a stream has no log-probabilities of an echo
            token_ids = whole.prompt_token_ids + token_ids
            rows = (whole.prompt_logprobs or []) + rows
        logprobs = None
        if one.logprobs is not None:
            logprobs = self.logprobs(token_ids, rows)
        return {"text": text, "logprobs": logprobs}

    def logprobs(self, token_ids: list[int], rows: Rows) -> dict:
        texts = self.texts
        return {
            "tokens": [*map(texts.name_of, token_ids)],
            # the first token of a prompt has no row
            "token_logprobs": [row and row[i] for i, row in zip(token_ids, rows)],
            "top_logprobs": [
                row and {texts.name_of(i): logprob for i, logprob in row.items()} for row in rows
            ],
        }
