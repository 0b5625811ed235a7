"""Chats: /v1/chat/completions, what it takes and what it answers."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanovllm.frontend.inputs import Inputs
from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.options import is_int, is_text, shown
from nanovllm.sequence import Request
from nanovllm.server.answers import Answers
from nanovllm.server.errors import BadRequest
from nanovllm.server.parsing import ForcedCalls, Parser, Parts
from nanovllm.server.protocol import Body, CallNamed, Format, Strict, forced_calls

MOST_MESSAGES = 4096
MOST_TOOLS = 128
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Message(BaseModel):
    """The template may use more fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | list[dict] | None = None
    tool_calls: list[dict] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


class ChatFields(Strict):
    """What makes the prompt of a chat, with its messages."""

    add_generation_prompt: bool | None = None  # if not given, it is True
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict], Field(max_length=MOST_TOOLS)] | None = None
    enable_thinking: bool | None = None  # short for the template's
    reasoning_effort: Effort | None = None

    def chat(self, messages: list[Message]) -> dict:
        """The conversation as messages.Chat has it."""
        names: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            names["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            names["enable_thinking"] = False
        if self.enable_thinking is not None:
            names["enable_thinking"] = self.enable_thinking
        return {
            "messages": [for_template(message) for message in messages],
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": names | (self.chat_template_kwargs or {}),
            "tools": [checked_tool(i, tool) for i, tool in enumerate(self.tools or [])],
        }


class ChatBody(ChatFields, Body):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["auto", "none", "required"] | CallNamed | None = None
    parallel_tool_calls: bool | None = None
    response_format: Format | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: bool | None = None
    add_special_tokens: Literal[False] | None = None  # they are in the template

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
        if self.tool_choice not in (None, "none") and not self.tools:
            raise BadRequest("tool_choice is allowed with tools only", "tool_choice")

    def requests(self, inputs: Inputs) -> Iterator[Request]:
        self.check()
        most = self.max_completion_tokens
        most = self.max_tokens if most is None else most  # None: as many as fit
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        more: dict[str, Any] = {"max_tokens": most, "logprobs": num_logprobs}
        prompt = self.chat(self.messages)
        if self.tool_choice == "none":
            prompt["tools"] = None
        if self.forces_calls:
            more["structured_outputs"] = forced_calls(
                self.tool_choice, prompt["tools"], self.parallel_tool_calls is not False
            )
        elif self.response_format is not None and self.response_format.wanted is not None:
            if self.structured_outputs is not None:
                both = "response_format and structured_outputs mean the same: give one"
                raise BadRequest(both, "response_format")
            more["structured_outputs"] = self.response_format.wanted
        params = self.params(inputs.default_params, **more)
        yield inputs.request(prompt, params, self.priority or 0)

    @property
    def has_form(self) -> bool:
        return bool(self.structured_outputs or self.response_format or self.forces_calls)

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")


class TokenizeBody(ChatFields):
    """A text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # if not given, it is True; in a chat they are there
    messages: Messages | None = None

    def told(self, inputs: Inputs) -> dict:
        """Raises ValueError or BadRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", "prompt")
        if inputs.tokenizer is None:
            raise BadRequest("the model has no tokenizer", status=501)
        if self.messages is not None:
            token_ids = inputs.encode(self.chat(self.messages))[1]
        else:
            is_special = self.add_special_tokens is not False
            token_ids = inputs.tokenizer.encode(self.prompt, add_special_tokens=is_special)
        longest = inputs.scheduler.max_model_len
        return {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids}


class ChatCompletions(Answers):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, requests: list[Request], *args):
        super().__init__(body, requests, *args)
        (request,) = requests
        n = request.params.n
        most_calls = 1 if body.parallel_tool_calls is False else None
        if body.forces_calls:
            choice = body.tool_choice
            name = choice.function.name if isinstance(choice, CallNamed) else None
            self.parsers: list[Any] = [ForcedCalls(name) for _ in range(n)]
        else:
            has_tools = bool(body.tools) and body.tool_choice != "none"
            self.parsers = [Parser(request.prompt, has_tools, most_calls) for _ in range(n)]
        self.has_reasoning = body.include_reasoning is not False

    def end(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {**super().end(outputs), "prompt_logprobs": self.prompt_logprobs(0, outputs[0])}

    def reason(self, one: CompletionOutput) -> str | None:
        if one.finish_reason == "stop" and self.parsers[one.index].num_calls:
            return "tool_calls"
        return super().reason(one)

    def parts(self, one: CompletionOutput) -> Parts:
        """The parts of a whole output, or of what is new in it."""
        return self.parsers[one.index].add(one.text, one.finish_reason is not None)

    def content(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        parts = self.parts(one)
        message: dict[str, Any] = {"content": parts.content}
        if parts.reasoning and self.has_reasoning:
            message["reasoning"] = parts.reasoning
            message["reasoning_content"] = parts.reasoning  # its older name: some clients know it
        if parts.tool_calls:
            message["tool_calls"] = parts.tool_calls
        if is_first:
            message["role"] = "assistant"
        name = "delta"
        if whole is not None:
            name = "message"
            message["content"] = parts.content or (None if parts.tool_calls else "")
            for call in parts.tool_calls:
                del call["index"]
        return {name: message, "logprobs": self.logprobs(one)}

    def logprobs(self, one: CompletionOutput) -> dict[str, list] | None:
        if one.logprobs is None:
            return None
        content = []
        num_wanted = self.requests[0].params.logprobs
        for token_id, row in zip(one.token_ids, one.logprobs):
            likeliest = sorted(row.items(), key=lambda item: -item[1])[:num_wanted]
            entry: dict[str, Any] = self.entry(token_id, row[token_id])
            entry["top_logprobs"] = [self.entry(*item) for item in likeliest]
            content.append(entry)
        return {"content": content}

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = [*self.texts.bytes_of(token_id)]
        return {"token": self.texts.of(token_id), "logprob": logprob, "bytes": data}


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


def checked_tool(i: int, tool: dict) -> dict:
    """A tool as the template gets it: without fields that are null."""
    function = tool.get("function")
    if not isinstance(function, dict):
        function = {}
    name = function.get("name")
    if tool.get("type") != "function" or not is_text(name):
        form = '{"type": "function", "function": {"name": ...}}'
        raise BadRequest(f"tools[{i}] must be {form}", "tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise BadRequest(f"tools[{i}].function.parameters must be a JSON schema", "tools")
    own = {key: value for key, value in function.items() if value is not None}
    return {**tool, "function": own}
