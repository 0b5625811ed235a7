"""Protocol: what clients of OpenAI's API may send.

A field is supported, or harmless, or refused by its name: nothing that would change the answer is
ignored.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanovllm.frontend.inputs import Inputs
from nanovllm.options import is_int, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Request

MOST_CHOICES = 1024  # of one call
# fields with the names and meanings of SamplingParams
SAME = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs", "logit_bias"}


class BadRequest(Exception):
    """The client's mistake: a sentence, the field, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.status = status


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # we add none


class Body(BaseModel):
    """What both endpoints take. None is the same as nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # these change no answer
    user: str | None = None
    metadata: dict | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def usage_is_streamed(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is allowed with stream=true only", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The model's default parameters with those of the body. Raises ValueError."""
        given = {name: value for name, value in self if name in SAME and value is not None}
        if self.logit_bias:
            given["logit_bias"] = {token_id(i): bias for i, bias in self.logit_bias.items()}
        return SamplingParams(**{**vars(defaults), **given, **more})


class CompletionBody(Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1) and self.best_of != self.n:
            raise BadRequest("best_of must be n: n is the number of outputs", "best_of")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_one = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[return-value, list-item]

    def requests(self, inputs: Inputs) -> list[Request]:
        """Raises ValueError."""
        self.check()
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            if self.stream:
                raise BadRequest("echo with logprobs cannot be streamed", "echo")
            more["prompt_logprobs"] = self.logprobs
        # OpenAI's default; 0 asks for the prompt only, with echo
        more["max_tokens"] = 16 if self.max_tokens is None else self.max_tokens
        if self.echo and self.max_tokens == 0:
            more["max_tokens"] = 1
        params = self.params(inputs.default_params, **more)
        num_choices = len(self.prompts) * params.n
        if not 0 < num_choices <= MOST_CHOICES:
            asked = f"{len(self.prompts):,} prompts with n={shown(params.n)}"
            raise BadRequest(f"{asked}: it must be 1 to {MOST_CHOICES:,} outputs", "prompt")
        priority = self.priority or 0
        return [inputs.request(prompt, params, priority) for prompt in self.prompts]


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]


class Message(BaseModel):
    """The template may use more fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[dict] | None = None
    tool_calls: list[dict] | None = None


class ChatFields(BaseModel):
    """What makes the prompt of a chat, with its messages."""

    model_config = ConfigDict(strict=True, extra="forbid")
    add_generation_prompt: bool | None = None  # if not given, it is True
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict] | None = None

    def chat(self, messages: list[Message]) -> dict:
        """The conversation as messages.Chat has it."""
        return {
            "messages": [for_template(message) for message in messages],
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": self.tools,
        }


class ChatBody(ChatFields, Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    enable_thinking: bool | None = None  # short for the template's

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs is allowed with logprobs=true only", "top_logprobs")
        if self.top_logprobs is not None and not is_int(self.top_logprobs, 0, 20):
            value = shown(self.top_logprobs)
            raise BadRequest(f"top_logprobs={value}: it must be from 0 to 20", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens):
            both = "max_tokens and max_completion_tokens mean the same: give one"
            raise BadRequest(both, "max_completion_tokens")

    def requests(self, inputs: Inputs) -> list[Request]:
        """Raises ValueError."""
        self.check()
        most = self.max_completion_tokens
        most = self.max_tokens if most is None else most  # None: as many as fit
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.params(inputs.default_params, max_tokens=most, logprobs=num_logprobs)
        prompt = self.chat(self.messages)
        if self.enable_thinking is not None:
            names = {"enable_thinking": self.enable_thinking}
            prompt["chat_template_kwargs"] = names | (self.chat_template_kwargs or {})
        if self.tool_choice == "none":
            prompt["tools"] = None
        return [inputs.request(prompt, params, self.priority or 0)]

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


class TokenizeBody(ChatFields):
    """A text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # if not given, it is True; in a chat they are there
    messages: list[Message] | None = Field(None, min_length=1)

    def token_ids(self, inputs: Inputs) -> list[int]:
        """Raises ValueError."""
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", "prompt")
        if inputs.tokenizer is None:
            raise BadRequest("the model has no tokenizer", status=501)
        if self.messages is not None:
            return inputs.encode(self.chat(self.messages))[1]
        is_special = self.add_special_tokens is not False
        return inputs.tokenizer.encode(self.prompt, add_special_tokens=is_special)


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = None
    tokens: list[int]

    def text(self, inputs: Inputs) -> str:
        """Raises ValueError."""
        if inputs.tokenizer is None:
            raise BadRequest("the model has no tokenizer", status=501)
        inputs.check_ids("tokens", self.tokens)
        return inputs.tokenizer.decode(self.tokens)


def for_template(message: Message) -> dict:
    """The message that templates expect: no empty fields, and the arguments of calls as objects."""
    fields = {name: value for name, value in message if value is not None}
    if message.role == "assistant" and message.tool_calls:
        fields["tool_calls"] = [with_arguments(call) for call in message.tool_calls]
    elif message.content is None:
        fields["content"] = None  # refused with its place
    return fields


def with_arguments(call: dict) -> dict:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest("arguments of a tool call are no JSON", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        problem = f"logit_bias has the key {shown(key)}: it must be a token id"
        raise BadRequest(problem, "logit_bias")
    return int(key)


def parsed(model: type[BaseModel], data: bytes) -> Any:
    """A body. Raises BadRequest with the first field that is wrong, and without its value."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    field = path[0][:100] if path else None
    reason = first["msg"][:200]
    if first["type"] in ("extra_forbidden", "none_required"):
        place = ".".join(path)[:200]
        raise BadRequest(f"{place} is not supported: leave it out", field)
    raise BadRequest(f"{field or 'the body'}: {reason}", field)
