"""Tool forms: how a model writes calls, as its chat template shows; and grammars that force calls.

When the server starts, the template writes a conversation with a call. The text around the name,
the arguments and the id is the form of the model.
"""

import json
import re
from dataclasses import dataclass, field, replace
from logging import Logger
from typing import Any

from nanovllm.processing.messages import Chat
from nanovllm.topics.server.parsing import Parser
from nanovllm.topics.server.tool_calls import MARKS, Functions

QUESTION = "a question"
NAME = "probe_name"
ID = "abcdefghi"
ARGUMENTS = '{"key": "value"}'
CALL = {"id": ID, "type": "function", "function": {"name": NAME, "arguments": {"key": "value"}}}
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"name": NAME, "description": "a probe", "parameters": PARAMETERS}

TAGGED = r"<parameter=key>\s*value\s*</parameter>\s*"
HOLES = re.compile(rf"({NAME}|{ID}|{re.escape(ARGUMENTS)}|{TAGGED})")
BEGIN = re.compile("|".join(map(re.escape, (*MARKS, "{"))))
END = re.compile(r'(?:[\s"}\])]|</function>|</tool_call>)*')
HINT = "calls in <tool_call> tags are read and forced, as Qwen writes them"


@dataclass(frozen=True)
class Form:
    """The text around calls, and a call in which the name, the arguments and the id are holes."""

    begin: str
    call: str
    end: str
    is_known: bool = True
    special: dict[str, int] = field(default_factory=dict)  # special tokens in it, with their ids

    @property
    def is_bare(self) -> bool:
        return self.begin.startswith("{")

    @property
    def is_tagged(self) -> bool:
        return "<parameter=" in self.call

    @property
    def text(self) -> str:
        return self.begin + self.call + self.end

    def log(self, logger: Logger) -> None:
        if self.is_known:
            logger.info("Tool calls, as the chat template writes them: %s", ascii(self.text))
        else:
            logger.warning("The chat template writes no tool calls that can be read: %s", HINT)

    def literal(self, text: str) -> str:
        """A part of the form in a grammar, which names special tokens by their ids."""
        tags = "|".join(map(re.escape, self.special)) or "(?!)"
        parts = []
        for part in filter(None, re.split(f"({tags})", text)):
            token_id = self.special.get(part)
            parts.append(json.dumps(part) if token_id is None else f"<[{token_id}]>")
        return " ".join(parts)


UNKNOWN = Form(
    begin='<tool_call>\n{"name": "',
    call=f'{NAME}", "arguments": {ARGUMENTS}',
    end="}\n</tool_call>",
    is_known=False,
)


def form_of(tokenizer: Any) -> Form:
    """The form in which the chat template writes calls; UNKNOWN if the parser cannot read it."""
    form = form_in(written(tokenizer, with_call=False), written(tokenizer, with_call=True))
    special = {}
    for i, token in tokenizer.added_tokens_decoder.items() if tokenizer else ():
        if token.special and token.content in form.text:
            special[token.content] = i
    return replace(form, special=special)


def written(tokenizer: Any, with_call: bool) -> str:
    """What the template writes behind a question: an answer with a call, or what opens one. Nothing
    if it refuses."""
    messages: list[dict] = [{"role": "user", "content": QUESTION}]
    if with_call:
        messages.append({"role": "assistant", "tool_calls": [CALL]})
    tools = [{"type": "function", "function": TOOL}]
    chat = Chat(messages=messages, tools=tools, add_generation_prompt=not with_call)
    try:
        return chat.text(tokenizer).rpartition(QUESTION)[2]
    except Exception:  # a template may raise anything
        return ""


def form_in(opening: str, text: str) -> Form:
    """The form of a text with a call, if `opening` stands before each answer."""
    mark = BEGIN.search(text)
    if mark is None:
        return UNKNOWN
    before = text[: mark.start()]
    if mark[0] == "{" and before.strip() != opening.strip():
        return UNKNOWN  # there is a mark that the parser does not know
    begin, *_ = HOLES.split(text[mark.start() :])
    *_, end = HOLES.split(text)
    found = END.match(end)
    call = text.removeprefix(before + begin).removesuffix(end)
    form = Form(begin, call, found[0].rstrip() if found else "")
    parser = Parser(None, True, None, {NAME: {}}, form.is_bare)
    calls = [call["function"] for call in parser.add(form.text, is_last=True).tool_calls]
    return form if calls == [{"name": NAME, "arguments": ARGUMENTS}] else UNKNOWN


# --- grammars ---

END_OF_VALUE = json.dumps("\n</parameter>\n")


def grammar_of_call(form: Form, functions: Functions) -> str:
    """A grammar, as Lark writes it, of a call of one of the functions."""
    rules = ["ID: /[a-zA-Z0-9]{9}/"]
    for i, (name, schema) in enumerate(functions.items()):
        arguments = of_tags(schema) if form.is_tagged else of_json(schema)
        holes = {NAME: form.literal(json.dumps(name)[1:-1]), ID: "ID"}
        parts = []
        for part in HOLES.split(form.call):
            is_hole = HOLES.fullmatch(part)
            parts.append(holes.get(part, arguments) if is_hole else form.literal(part))
        rules.append(f"call_{i}: {' '.join(parts)}")
    calls = " | ".join(f"call_{i}" for i in range(len(functions)))
    start = f"start: {form.literal(form.begin)} ({calls}) {form.literal(form.end)}"
    return "\n".join([start, *rules])


def of_json(schema: dict) -> str:
    return f"%json {json.dumps(schema)}"


def of_tags(schema: dict) -> str:
    """The parameters of a function, each between its tags. A text is JSON, too: the schema then
    says all of it."""
    places = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parameters = []
    for key, value in (schema.get("properties") or {}).items():
        begin = json.dumps(f"<parameter={key}>\n")
        may_lack = "" if key in (schema.get("required") or ()) else "?"
        parameters.append(f"({begin} {of_json({**value, **places})} {END_OF_VALUE}){may_lack}")
    return " ".join(parameters)
