"""Responses: the bodies and answers of /v1/responses, the newer form of a chat. The server stores
nothing: a client sends the whole conversation, and fields that need a store are refused."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field, ValidationError

from nanovllm.processing.inputs import Inputs
from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request
from nanovllm.topics.server import chats
from nanovllm.topics.server.answers import encode
from nanovllm.topics.server.errors import Refused, first_problem
from nanovllm.topics.server.parsing import Parts
from nanovllm.topics.server.protocol import CallBody, Strict

ALIKE = {
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "request_id",
}  # fields, in a chat
TEXTS = ("input_text", "output_text", "text")  # the kinds of parts of a message


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Strict):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: chats.Effort | None = None
    summary: str | None = None  # a model here makes none


class FlatTool(chats.Open):
    """A function; in a chat it is one level deeper."""

    type: Literal["function"]
    name: str


class ResponseBody(CallBody):
    input: str | Annotated[list[dict], Field(min_length=1, max_length=chats.MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FlatTool], Field(max_length=chats.MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none

    @cached_property
    def chat(self) -> chats.ChatBody:
        """The same conversation as a chat. Raises Refused."""
        form = self.text.format
        wanted: dict[str, Any] = {"type": form.type}
        if form.type == "json_schema":
            wanted["json_schema"] = {"schema": form.schema_ or {}}
        body = {
            **self.model_dump(include=ALIKE),
            "messages": self.messages(),
            "max_tokens": self.max_output_tokens,
            "tools": [deeper(tool) for tool in self.tools or []] or None,
            "tool_choice": self.tool_choice,
            "response_format": wanted,
            "reasoning_effort": self.reasoning.effort,
        }
        if isinstance(self.tool_choice, FlatTool):
            body["tool_choice"] = deeper(self.tool_choice)
        try:
            return chats.ChatBody.model_validate(body)
        except ValidationError as error:
            raise first_problem(error) from error

    def messages(self) -> list[dict]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for i, item in enumerate(items):
            message = message_of(item, f"input[{i}]")
            if "tool_calls" in message and messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"] += message["tool_calls"]
            elif message:
                messages.append(message)
        return messages

    def requests(self, inputs: Inputs) -> Iterator[Request]:
        """Raises ValueError or Refused."""
        return self.chat.requests(inputs)


def deeper(flat: FlatTool) -> dict:
    """Puts all fields but the type one level deeper, as in a chat."""
    fields = flat.model_dump(exclude_unset=True)
    return {"type": fields.pop("type"), "function": fields}


def message_of(item: dict, place: str) -> dict[str, Any]:
    """The message for an item; empty if templates have no use for it. Raises Refused."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return {}  # of an earlier answer: templates leave it out
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = plain(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    role = item.get("role")
    if kind != "message" or role not in ("user", "assistant", "system", "developer"):
        allowed = "it must be a message, a function_call, its output, or reasoning"
        raise Refused(
            f"{place} has the type {str(kind)[:100]!r}: {allowed}, with its role", "input"
        )
    return {"role": role, "content": plain(item.get("content"), f"{place}.content")}


def plain(content: Any, place: str) -> str:
    """A text, or a list of parts with text, as one text. Raises Refused."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [{}]:
        is_text = isinstance(part, dict) and part.get("type") in TEXTS
        if not is_text or not isinstance(part.get("text"), str):
            raise Refused(f"{place} must be text, or a list of parts with text", "input")
        texts.append(part["text"])
    return "\n".join(texts)


class Items:
    """The items of an answer, while they come, and their events."""

    def __init__(self) -> None:
        self.output: list[dict] = []
        self.events: list[str] = []
        self.num_events = 0
        self.is_open = False  # the last item is a text that may grow

    def tell(self, kind: str, **content: Any) -> None:
        event = {"type": kind, "sequence_number": self.num_events, **content}
        self.num_events += 1
        self.events.append(f"event: {kind}\ndata: {encode(event)}\n\n")

    def take(self) -> list[str]:
        taken = self.events
        self.events = []
        return taken

    def place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def add(self, parts: Parts) -> None:
        for kind, text in (("reasoning", parts.reasoning), ("message", parts.content)):
            if text:
                self.add_text(kind, text)
        for call in parts.tool_calls:
            self.add_call(call)

    def add_text(self, kind: str, text: str) -> None:
        if not self.is_open or self.output[-1]["type"] != kind:
            self.close()
            self.open(kind)
        content = self.output[-1]["content"][0]
        content["text"] += text
        self.tell_text("delta", delta=text)

    def open(self, kind: str) -> None:
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"type": kind, "id": f"rs_{uuid4().hex}", "summary": []}
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": f"msg_{uuid4().hex}", "role": "assistant"}
        self.add_item({**item, "status": "in_progress", "content": []})
        self.output[-1]["content"].append(content)
        self.tell("response.content_part.added", **self.place(), content_index=0, part=content)
        self.is_open = True

    def tell_text(self, event: str, **more: Any) -> None:
        """An event of the open text item."""
        kind = self.output[-1]["content"][0]["type"]
        if kind == "output_text":
            more["logprobs"] = []
        self.tell(f"response.{kind}.{event}", **self.place(), content_index=0, **more)

    def close(self, status: str = "completed") -> None:
        """Ends the open text item, if there is one."""
        if not self.is_open:
            return
        self.is_open = False
        content = self.output[-1]["content"][0]
        self.tell_text("done", text=content["text"])
        self.tell("response.content_part.done", **self.place(), content_index=0, part=content)
        self.end_item(status)

    def add_call(self, call: dict) -> None:
        self.close()
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": call["id"]}
        self.add_item({**item, "name": name, "arguments": "", "status": "in_progress"})
        kind = "response.function_call_arguments"
        self.tell(f"{kind}.delta", **self.place(), delta=arguments)
        self.tell(f"{kind}.done", **self.place(), name=name, arguments=arguments)
        self.output[-1]["arguments"] = arguments
        self.end_item("completed")

    def add_item(self, item: dict) -> None:
        self.output.append(item)
        self.tell("response.output_item.added", output_index=len(self.output) - 1, item=item)

    def end_item(self, status: str) -> None:
        item = self.output[-1]
        item["status"] = status
        self.tell("response.output_item.done", output_index=len(self.output) - 1, item=item)


class Responses(chats.ChatCompletions):
    """The answer to a chat, as events of the responses API."""

    kind = chunk_kind = "response"
    prefix = "resp"
    last_event = ""

    def __init__(self, body: ResponseBody, *args):
        super().__init__(body.chat, *args)
        self.asked = {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "user": body.user,
            **body.model_dump(include={"tools", "tool_choice"}, exclude_none=True),
        }
        self.items = Items()
        for kind in ("created", "in_progress"):
            self.items.tell(f"response.{kind}", response=self.response("in_progress"))

    def response(self, status: str, **more: Any) -> dict:
        params = self.requests[0].params
        return {
            "id": self.frame["id"],
            "object": self.kind,
            "created_at": self.frame["created"],
            "model": self.frame["model"],
            "status": status,
            "background": False,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **self.asked,
            **more,
        }

    def whole(self, outputs: list[RequestOutput]) -> str:
        (one,) = outputs[0].outputs
        self.items.add(self.parts(one))
        return encode(self.ended(outputs))

    def ended(self, outputs: list[RequestOutput]) -> dict:
        (one,) = outputs[0].outputs
        is_cut = one.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        self.items.close(status)
        usage = self.usage(outputs)
        return self.response(
            status,
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
