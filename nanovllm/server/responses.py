"""Responses: /v1/responses, the newer form of a chat: what it takes, and what it answers.

Nothing is stored: a conversation is sent as a whole, and what only a store could do is refused.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from nanovllm.frontend.inputs import Inputs
from nanovllm.frontend.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request
from nanovllm.server.answers import encode
from nanovllm.server.chats import MOST_MESSAGES, MOST_TOOLS, ChatBody, ChatCompletions, Effort
from nanovllm.server.errors import BadRequest
from nanovllm.server.items import Items
from nanovllm.server.protocol import CallBody, Strict, checked

ALIKE = {"model", "temperature", "top_p", "parallel_tool_calls", "stream"}  # fields, in a chat
TEXTS = ("input_text", "output_text", "text")  # the kinds of parts of a message


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: str | None = None  # a model here makes none


class ResponseBody(CallBody):
    input: str | Annotated[list[dict], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[dict], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none

    @cached_property
    def chat(self) -> ChatBody:
        """The same, as a chat. Raises BadRequest."""
        body = {
            **self.model_dump(include=ALIKE),
            "messages": self.messages(),
            "max_tokens": self.max_output_tokens,
            "tools": [chat_tool(tool) for tool in self.tools or []] or None,
            "tool_choice": chat_choice(self.tool_choice),
            "response_format": self.response_format,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        return checked(ChatBody, body)

    @property
    def response_format(self) -> dict | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        schema = {"json_schema": {"schema": wanted.schema_ or {}}}
        return {"type": wanted.type, **(schema if wanted.type == "json_schema" else {})}

    def messages(self) -> list[dict]:
        messages: list[dict] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for i, item in enumerate(items):
            message = message_of(item, f"input[{i}]")
            is_call = message is not None and "tool_calls" in message
            if is_call and messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"] += message["tool_calls"]  # type: ignore[index]
            elif message is not None:
                messages.append(message)
        return messages

    @property
    def has_form(self) -> bool:
        return self.chat.has_form

    def requests(self, inputs: Inputs) -> Iterator[Request]:
        """Raises ValueError or BadRequest."""
        return self.chat.requests(inputs)


def message_of(item: dict, place: str) -> dict | None:
    """The message that an item of the input is; None if a template has no use for it."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None  # of an earlier answer: templates leave it out
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = plain(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        raise BadRequest(
            f"{place} has the type {str(kind)[:100]!r}, which is not supported", "input"
        )
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise BadRequest(f"{place}.role must be user, assistant, system or developer", "input")
    name = "system" if role == "developer" else role  # as templates know it
    return {"role": name, "content": plain(item.get("content"), f"{place}.content")}


def plain(content: Any, place: str) -> str:
    """A text, or a list of parts with text, as one text. Raises BadRequest."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [{}]:
        is_text = isinstance(part, dict) and part.get("type") in TEXTS
        if not is_text or not isinstance(part.get("text"), str):
            raise BadRequest(f"{place} must be text, or a list of parts with text", "input")
        texts.append(part["text"])
    return "\n".join(texts)


def chat_choice(choice: str | dict | None) -> str | dict | None:
    if not isinstance(choice, dict):
        return choice
    others = {name: value for name, value in choice.items() if name != "name"}
    return {**others, "function": {"name": choice.get("name")}}


def chat_tool(tool: dict) -> dict:
    """A function as chats have it: one level deeper."""
    if tool.get("type") != "function":
        return tool  # refused there
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


class Responses(ChatCompletions):
    """A chat's answer, of which other events tell."""

    kind = chunk_kind = "response"
    prefix = "resp"
    last_event = ""

    def __init__(self, body: ResponseBody, *args):
        super().__init__(body.chat, *args)
        self.asked = body
        self.items = Items()
        for kind in ("created", "in_progress"):
            self.items.tell(f"response.{kind}", response=self.response("in_progress"))

    def response(self, status: str, **more: Any) -> dict:
        body = self.asked
        form = (body.text and body.text.format) or TextFormat()
        params = self.requests[0].params
        return {
            "id": self.id,
            "object": self.kind,
            "created_at": self.frame["created"],
            "model": self.frame["model"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **more,
        }

    def blocks(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        (one,) = outputs[0].outputs
        self.items.add(self.parts(one))
        yield encode(self.ended(outputs)).encode()

    def ended(self, outputs: list[RequestOutput]) -> dict:
        (one,) = outputs[0].outputs
        is_cut = one.finish_reason == "length"
        self.items.close("incomplete" if is_cut else "completed")
        usage = self.usage(outputs)
        return self.response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self.items.output,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        )

    def events(self, i: int, part: CompletionOutput) -> list[str]:
        self.items.add(self.parts(part))
        return self.items.take()

    def last(self, outputs: list[RequestOutput]) -> list[str]:
        response = self.ended(outputs)
        self.items.tell(f"response.{response['status']}", response=response)
        return self.items.take()

    def error_event(self, error: dict) -> str:
        details = {**error["error"], "code": str(error["error"]["code"])}
        self.items.tell("error", **{name: details[name] for name in ("code", "message", "param")})
        return "".join(self.items.take())
