"""Tool forms: how a model writes calls, as its chat template shows; and grammars that force calls.

When the server starts, the template writes a conversation with a call, and with two. Where the
name, the arguments and the id stand in what it writes, a grammar has those of the tools.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from logging import Logger
from typing import Any

from nanovllm.processing.messages import Chat
from nanovllm.topics.server.parsing import Parser
from nanovllm.topics.server.tool_calls import MARKS, Functions, kinds_of, options_of

QUESTION = "a question"  # that no template contains
NAME, ID = "probe_name", "abcdefghi"
PROBE = {"name": NAME, "arguments": {"key": "value"}}
CALL = {"id": ID, "type": "function", "function": PROBE}
KEY = {"type": "string", "description": "a key"}
PARAMETERS = {"type": "object", "properties": {"key": KEY}, "required": ["key"]}
TOOL = {"name": NAME, "description": "a probe", "parameters": PARAMETERS}

TAGGED = r"<parameter=key>\s*value\s*</parameter>\s*"
HOLES = re.compile(rf'({NAME}|{ID}|\{{\s*"key":\s*"value"\s*\}}|{TAGGED})')
BEGIN = re.compile("|".join(map(re.escape, (*MARKS, "{"))))
HINT = "calls in <tool_call> tags are read and forced, as Qwen writes them"
END = re.compile(r'(?:[\s"}\])]|</function>|</tool_call>)*')


@dataclass(frozen=True)
class Form:
    """The text around calls, and one call, with holes."""

    begin: str
    call: str
    between: str  # two calls; empty if the template writes one only
    end: str
    is_known: bool = True
    special: dict[str, int] = field(default_factory=dict)  # special tokens in it, with their ids

    @property
    def is_bare(self) -> bool:
        return self.begin.startswith("{")

    @property
    def text(self) -> str:
        return self.begin + self.call + self.end

    def log(self, logger: Logger) -> None:
        if self.is_known:
            logger.info("Tool calls, as the chat template writes them: %s", ascii(self.text))
        else:
            logger.warning("The chat template writes no tool calls that can be read: %s", HINT)


UNKNOWN = Form(
    '<tool_call>\n{"name": "',
    f'{NAME}", "arguments": {{"key": "value"}}',
    '}\n</tool_call>\n<tool_call>\n{"name": "',
    "}\n</tool_call>",
    is_known=False,
)


def form_of(tokenizer: Any) -> Form:
    """The form in which the chat template writes calls; that of Qwen if the parser cannot read it."""
    form = form_in(*(written(tokenizer, num_calls) for num_calls in range(3)))
    tokens = tokenizer.added_tokens_decoder.items() if tokenizer else ()
    special = {token.content: i for i, token in tokens if token.special}
    return replace(form, special={tag: i for tag, i in special.items() if tag in form.text})


def written(tokenizer: Any, num_calls: int) -> str:
    """What the template writes behind a question: an answer with calls, or what opens one. Nothing
    if it refuses."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
    chat["tools"] = [{"type": "function", "function": TOOL}]
    if num_calls:
        chat["messages"].append({"role": "assistant", "tool_calls": [CALL] * num_calls})
    try:
        text = Chat(**chat, add_generation_prompt=not num_calls).text(tokenizer)
    except Exception:  # a template may raise anything
        return ""
    return text.rpartition(QUESTION)[2]


def form_in(opening: str, one: str, two: str) -> Form:
    """The form of a text with one call, and of one with two."""
    mark = BEGIN.search(one)
    holes = [*HOLES.finditer(one, mark.start())] if mark else []
    if not mark or not holes:
        return UNKNOWN
    if mark[0] == "{" and one[: mark.start()].strip() != opening.strip():
        return UNKNOWN  # there is a mark that we do not know
    begin = one[mark.start() : holes[0].start()]
    call = one[holes[0].start() : holes[-1].end()]
    end = END.match(one, holes[-1].end())
    between, *more = two.partition(begin + call)[2].split(call)
    form = Form(begin, call, between if more else "", end[0].rstrip() if end else "")
    parser = Parser(None, True, None, {NAME: {}}, form.is_bare)
    found = [call["function"] for call in parser.add(form.text, True).tool_calls]
    return form if found == [{**PROBE, "arguments": json.dumps(PROBE["arguments"])}] else UNKNOWN


# --- grammars ---

END_OF_VALUE = json.dumps("\n</parameter>\n")


def grammar_of_calls(form: Form, functions: Functions, is_parallel: bool) -> str:
    """A grammar, as Lark writes it, of one call or several."""

    def literal(text: str) -> str:
        """A grammar names special tokens by their ids."""
        tags = "|".join(map(re.escape, form.special)) or "(?!)"
        names = {tag: f"<[{token_id}]>" for tag, token_id in form.special.items()}
        parts = [part for part in re.split(f"({tags})", text) if part]
        return " ".join(names.get(part, json.dumps(part)) for part in parts)

    rules = [r"ID: /[a-zA-Z0-9]{9}/"]
    for i, (name, schema) in enumerate(functions.items()):
        parts = HOLES.split(form.call)
        holes = {NAME: literal(json.dumps(name)[1:-1]), ID: "ID"}
        parts[::2] = map(literal, parts[::2])
        parts[1::2] = [holes.get(hole, f"args_{i}") for hole in parts[1::2]]
        rules.append(f"call_{i}: {' '.join(parts)}")
        is_tagged = "<parameter=" in form.call
        rules += rules_of_tags(i, schema) if is_tagged else [f"args_{i}: {of_json(schema)}"]
    more = f"({literal(form.between)} call)*" if is_parallel and form.between else ""
    calls = " | ".join(f"call_{i}" for i in range(len(functions)))
    start = f"start: {literal(form.begin)} call {more} {literal(form.end)}"
    return "\n".join([start, f"call: {calls}", *rules])


def of_json(schema: dict) -> str:
    return f"%json {json.dumps(schema)}"


def rules_of_tags(i: int, schema: dict) -> Iterator[str]:
    """The rules for the parameters of function i: each is JSON, or text up to the end tag."""
    places = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parameters = []
    for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
        values = []
        for k, option in enumerate(options_of(value, schema)):
            name = f"TEXT_{i}_{j}_{k}"
            if kinds_of(option) - {"string"}:
                name = of_json({**option, **places})
            else:
                yield f"{name}: {text_of(option)}"
            values.append(f"{name} {END_OF_VALUE}")
        begin = json.dumps(f"<parameter={key}>\n")
        may_lack = "" if key in (schema.get("required") or ()) else "?"
        parameters.append(f"({begin} ({' | '.join(values)})){may_lack}")
    yield f"args_{i}: {' '.join(parameters)}"


def text_of(schema: dict) -> str:
    """A terminal for a text that the schema allows: by its values, or its pattern and length."""
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    size = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    pattern = schema.get("pattern", "").replace("/", "\\/")
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") else "(?s:.*)"
    inner = f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}"
    no_tags = r"~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/"
    return f"/(?s:.{size})/ & /{inner}/ & {no_tags}"
