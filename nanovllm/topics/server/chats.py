"""Chats: the bodies and answers of /v1/chat/completions."""

import json
from collections.abc import Iterator
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from nanovllm.processing.inputs import Inputs
from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.sequence import Request
from nanovllm.topics.server.answers import Answers, TokenTexts
from nanovllm.topics.server.errors import Refused
from nanovllm.topics.server.parsing import THINK, Parser
from nanovllm.topics.server.protocol import Body, Strict
from nanovllm.topics.server.tool_calls import Functions
from nanovllm.topics.server.tool_forms import Form, grammar_of_call

MOST_MESSAGES = 4096
MOST_TOOLS = 128
# names that a template does not get
RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
# the arguments of a function without parameters
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Open(BaseModel):
    """The template may use more fields."""

    model_config = ConfigDict(strict=True, extra="allow")


class Message(Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict] | None = None
    tool_calls: list[dict] | None = None

    def for_template(self) -> dict:
        """The message for a template: no empty fields, arguments as objects. Raises Refused."""
        fields = {name: value for name, value in self if value is not None}
        if self.role == "developer":  # templates leave out messages of a role that they do not know
            fields["role"] = "system"
        if self.role == "assistant" and self.tool_calls:
            fields["tool_calls"] = [with_arguments(call) for call in self.tool_calls]
        elif self.content is None:
            fields["content"] = None  # the engine refuses it with its place
        return fields


class Function(Open):
    name: Annotated[str, Field(min_length=1)]
    parameters: dict | None = None


class Tool(Open):
    type: Literal["function"]
    function: Function


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


class Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # its name and description
    schema_: dict[str, Any] = Field({}, alias="schema")


class Format(Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The value for SamplingParams.structured_outputs. Raises Refused."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            problem = 'json_schema goes with type "json_schema" only, and is needed there'
            raise Refused(f"response_format: {problem}", "response_format")
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class Named(Strict):
    name: str


class CallNamed(Strict):
    """A function that the model must call."""

    type: Literal["function"]
    function: Named


class ChatFields(Strict):
    """What makes the prompt of a chat, with its messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    reasoning_effort: Effort | None = None

    def chat(self, messages: list[Message]) -> dict:
        """The conversation as a messages.Chat. Raises Refused."""
        wrong = sorted(RESERVED & {*(self.chat_template_kwargs or ())})
        if wrong:
            problem = f"chat_template_kwargs.{wrong[0]} is not supported"
            raise Refused(f"{problem}: the template cannot use this name", "chat_template_kwargs")
        names: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            names["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            names["enable_thinking"] = False
        return {
            "messages": [message.for_template() for message in messages],
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": names | (self.chat_template_kwargs or {}),
            "tools": [tool.model_dump(exclude_none=True) for tool in self.tools or []],
        }


class ChatBody(ChatFields, Body):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["auto", "none", "required"] | CallNamed | None = None
    parallel_tool_calls: bool = True
    response_format: Format | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: bool = True
    add_special_tokens: Literal[False] | None = None  # they are in the template

    def requests(self, inputs: Inputs) -> Iterator[Request]:
        """Raises ValueError or Refused."""
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs is allowed with logprobs=true only", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            both = "max_tokens and max_completion_tokens mean the same: give one"
            raise Refused(both, "max_completion_tokens")
        if self.forces_calls and not self.tools:
            raise Refused("tool_choice is allowed with tools only", "tool_choice")
        most = next(iter(limits), None)  # None: as many as fit
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        more: dict[str, Any] = {"max_tokens": most, "logprobs": num_logprobs}
        prompt = self.chat(self.messages)
        if self.tool_choice == "none":
            prompt["tools"] = None
        wanted = self.response_format and self.response_format.wanted
        if self.functions and inputs.tool_form.special and self.skip_special_tokens is None:
            more["skip_special_tokens"] = False  # the tags of calls are such tokens
        if self.forces_calls:  # such an answer has no text that could have a format
            wanted = self.forced_call(inputs.tool_form)
        if wanted:
            more["structured_outputs"] = wanted
            if self.structured_outputs is not None:
                both = f"{self.field_of_form} and structured_outputs ask for two forms: give one"
                raise Refused(both, "structured_outputs")
        params = self.params(inputs.default_params, **more)
        yield inputs.request(prompt, params)

    @property
    def field_of_form(self) -> str:
        """The field that structured outputs come from, if they are not given as such."""
        return "tools" if self.forces_calls else "response_format"

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def functions(self) -> Functions:
        """The functions that the model may call: each with the schema of its arguments, which are
        always an object."""
        if not self.tools or self.tool_choice == "none":
            return {}
        schemas = {}
        for function in (tool.function for tool in self.tools):
            given = NOTHING if function.parameters is None else function.parameters
            schemas[function.name] = {**given, "type": "object"}
        return schemas

    def forced_call(self, form: Form) -> dict[str, Any]:
        """Makes the model answer with a call of the named function, or of any. Raises Refused."""
        functions = self.functions
        if isinstance(self.tool_choice, CallNamed):
            name = self.tool_choice.function.name
            if name not in functions:
                problem = f"tool_choice names {name[:200]!r}, which is none of the tools"
                raise Refused(problem, "tool_choice")
            functions = {name: functions[name]}
        try:
            return {"grammar": grammar_of_call(form, functions)}
        except (TypeError, LookupError, AttributeError, RecursionError) as error:
            raise Refused(f"parameters of a tool are no JSON schema: {error!r}", "tools") from error


class TokenizeBody(ChatFields):
    """A text, or a chat. Clients may send the fields of the request that they will make."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True  # in a chat they are in the template
    messages: Messages | None = None

    def told(self, inputs: Inputs) -> dict:
        """Raises ValueError or Refused."""
        if self.messages is not None and self.prompt is None:
            token_ids = inputs.encode(self.chat(self.messages))[1]
        elif self.prompt is not None and self.messages is None:
            token_ids = inputs.tokens(self.prompt, add_special_tokens=self.add_special_tokens)
        else:
            raise Refused("give either prompt or messages", "prompt")
        longest = inputs.scheduler.max_model_len
        return {"count": len(token_ids), "max_model_len": longest, "tokens": token_ids}


class ChatCompletions(Answers):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, requests: list[Request], inputs: Inputs, texts: TokenTexts):
        super().__init__(body, requests, inputs, texts)
        (request,) = requests
        functions = body.functions
        most_calls = None if body.parallel_tool_calls else 1
        before = (request.prompt or "").rstrip()[-len(THINK) :]
        if body.continue_final_message:
            before = str(body.messages[-1].content)
        grammar = request.rules and request.rules.grammar
        if grammar and grammar.end_of_think is None:
            before = ""  # the form starts at once: there is no reasoning
        self.no_content = "" if not body.forces_calls else None
        is_bare = inputs.tool_form.is_bare
        arguments = (before, bool(functions), most_calls, functions, is_bare, body.forces_calls)
        self.parsers = [Parser(*arguments) for _ in range(request.params.n)]
        self.has_reasoning = body.include_reasoning

    def reason(self, one: CompletionOutput) -> str | None:
        if one.finish_reason == "stop" and self.parsers[one.index].num_calls:
            return "tool_calls"
        return super().reason(one)

    def content(
        self, i: int, one: CompletionOutput, whole: RequestOutput | None, is_first: bool
    ) -> dict:
        parts = self.parsers[one.index].add(one.text, one.finish_reason is not None)
        message: dict[str, Any] = {"content": parts.content or self.no_content}
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


def with_arguments(call: dict) -> dict:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise Refused("arguments of a tool call are not JSON", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
