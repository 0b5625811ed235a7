"""Completions: /v1/completions, what it takes and what it answers."""

from collections.abc import Iterator
from typing import Any

from pydantic import SkipValidation

from nanovllm.frontend.inputs import Inputs
from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.options import PromptTooLong, is_int, shown
from nanovllm.sequence import Request
from nanovllm.server.answers import Answers, Rows
from nanovllm.server.errors import BadRequest
from nanovllm.server.protocol import MOST_CHOICES, Body


class CompletionBody(Body):
    # checked in `prompts`: pydantic would look at a million ids, for each of the four kinds
    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None  # if not given, it is True

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1) and self.best_of != self.n:
            raise BadRequest("best_of must be n: n is the number of outputs", "best_of")
        if self.echo and self.logprobs is not None and self.stream:
            raise BadRequest("echo with logprobs cannot be streamed", "echo")

    def prompts(self, most_tokens: int) -> list[str] | list[list[int]]:
        """Raises BadRequest or PromptTooLong."""
        prompts: Any = self.prompt
        if isinstance(prompts, str):
            return [prompts]
        if not isinstance(prompts, list):
            raise BadRequest("prompt must be text, a list of texts, or token ids", "prompt")
        if prompts and not isinstance(prompts[0], str | list):
            prompts = [prompts]
        num_choices = len(prompts) * (self.n or 1)
        if not 0 < num_choices <= MOST_CHOICES:
            asked = f"prompt has {len(prompts):,} of them, with n={shown(self.n or 1)}"
            param = "n" if len(prompts) == 1 else "prompt"
            raise BadRequest(f"{asked}: it must be 1 to {MOST_CHOICES:,} outputs", param)
        kind = type(prompts[0])
        for i, one in enumerate(prompts):
            if type(one) is not kind:
                raise BadRequest(f"prompt[{i}] is no {kind.__name__}, as the first one", "prompt")
            if isinstance(one, str):
                continue
            if len(one) > most_tokens:
                limit = f"max_model_len leaves room for {most_tokens:,}"
                raise PromptTooLong(f"the prompt has {len(one):,} tokens, but {limit}")
            wrong = [value for value in one if not is_int(value, 0)]
            if wrong:
                problem = f"prompt has {shown(wrong[0])} among its token ids"
                raise BadRequest(f"{problem}: they must be integers from 0 on", "prompt")
        return prompts

    def requests(self, inputs: Inputs) -> Iterator[Request]:
        self.check()
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        # OpenAI's default; 0 asks for the prompt only, with echo
        more["max_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        if self.echo and self.max_tokens == 0:
            more["max_tokens"] = 1
        params = self.params(inputs.default_params, **more)
        for prompt in self.prompts(inputs.scheduler.max_model_len - 1):
            if isinstance(prompt, str) and self.add_special_tokens is False:
                prompt = inputs.tokens(prompt, add_special_tokens=False)
            yield inputs.request(prompt, params, self.priority or 0)


class Completions(Answers):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, requests: list[Request], *args):
        super().__init__(body, requests, *args)
        self.has_echo = bool(body.echo)
        self.num_prompt_logprobs = body.prompt_logprobs
        self.is_prompt_only = self.has_echo and body.max_tokens == 0
        self.num_chars: dict[tuple[int, int], int] = {}  # that were streamed, as `counts`

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
        if self.has_echo and is_first:
            text = self.echo(i) + text
        if self.has_echo and whole is not None:  # a stream has no log-probabilities of an echo
            token_ids = whole.prompt_token_ids + token_ids
            rows = (whole.prompt_logprobs or []) + rows
        logprobs = None
        if one.logprobs is not None:
            logprobs = self.logprobs((i, one.index), token_ids, rows)
        content: dict[str, Any] = {"text": text, "logprobs": logprobs}
        if whole is not None:  # those of an echo are asked for by `logprobs`
            is_asked_for = self.num_prompt_logprobs is not None
            content["prompt_logprobs"] = self.prompt_logprobs(i, whole) if is_asked_for else None
        return content

    def logprobs(self, key: tuple[int, int], token_ids: list[int], rows: Rows) -> dict:
        texts = self.texts
        before = self.num_chars.get(key, 0)
        offsets, self.num_chars[key] = texts.offsets(token_ids, before)
        return {
            "tokens": [*map(texts.name_of, token_ids)],
            # the first token of a prompt has no row
            "token_logprobs": [row and row[i] for i, row in zip(token_ids, rows)],
            "top_logprobs": [
                row and {texts.name_of(i): logprob for i, logprob in row.items()} for row in rows
            ],
            "text_offset": offsets,
        }
