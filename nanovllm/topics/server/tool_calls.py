"""Tool calls: the forms in which models write them. This file has what finds the end of a call in a
text that grows (a Scan), what reads the call, and the grammar that forces calls.

A call is read in each form. Which form a model was trained on follows from what its chat template
writes for a call in the history: `form_of`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any

from nanovllm.processing.messages import Chat

TOOL = "<tool_call>"
END_OF_TOOL = "</tool_call>"
ELEMENT = "<function="  # some models leave out the tag before it
MISTRAL = "[TOOL_CALLS]"
PYTHON = "<|python_tag|>"
BEGINS = (TOOL, ELEMENT, MISTRAL, PYTHON)  # of calls
TAGS = (*BEGINS, END_OF_TOOL, "[ARGS]")
OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
Functions = dict[str, dict]  # the schema of the arguments of each function


@dataclass(frozen=True)
class Form:
    words: str  # for the log
    calls: str = "%\n%"  # two calls; "%": the template writes no second one
    call: str = OBJECT
    begins: tuple[str, ...] = BEGINS
    special: dict[str, int] = field(default_factory=dict)  # tags that are special tokens


XML = f"{TOOL}\n{ELEMENT}NAME>\nARGUMENTS</function>\n{END_OF_TOOL}"
TAGGED = f"{TOOL}\n{OBJECT}\n{END_OF_TOOL}"
BARE = '{"name": "NAME", "parameters": ARGUMENTS}'
FORMS = (
    Form("XML in <tool_call> tags", call=XML),
    Form("JSON in <tool_call> tags", call=TAGGED),
    Form("a JSON list in <tool_call> tags", f"{TOOL}[%, %]{END_OF_TOOL}"),
    Form("a JSON list behind [TOOL_CALLS]", f"{MISTRAL}[%, %]"),
    Form("names and JSON behind [TOOL_CALLS]", "%%", f"{MISTRAL}NAME[ARGS]ARGUMENTS"),
    Form('JSON without tags, with "parameters"', "%", BARE, (*BEGINS, "{")),
)
UNKNOWN = Form("no known form in the chat template: those in tags are read", call=TAGGED)

QUESTION = "a question"
PROBE = {"name": "probe", "arguments": {"key": "value"}}
CALLS = [{"id": "abcdefghi", "type": "function", "function": PROBE}]


def form_of(tokenizer: Any) -> Form:
    """The form in which the chat template writes a call; UNKNOWN if it writes none that we know."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    chat += [{"role": "assistant", "tool_calls": CALLS}]
    tools = [{"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}]
    try:
        written = Chat(messages=chat, tools=tools).text(tokenizer)
    except Exception:  # a template may raise anything
        written = ""
    written = "".join(written.rpartition(QUESTION)[2].split())  # the instructions stand before
    for form in FORMS:
        begin = form.calls.replace("%", form.call).partition("ARGUMENTS")[0]
        if "".join(begin.split()).replace("NAME", "probe") in written:
            break
    else:
        form = UNKNOWN
    tokens = tokenizer.added_tokens_decoder.items() if tokenizer else ()
    special = {token.content: i for i, token in tokens if token.special and token.content in TAGS}
    return replace(form, special=special)


# --- where a call ends ---


JSON = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
# an argument may contain the tag, but with no line end before it: so one quotation mark too many
# does no harm
TAG = re.compile(rf'\\.|"|\n?{END_OF_TOOL}', re.DOTALL)
ELEMENTS = re.compile(f"<parameter=|</parameter>|</function>|{END_OF_TOOL}")
NO_CALL = re.compile("")  # ends at once: what seemed to begin a call is text
ENDS = ("}", "]", END_OF_TOOL, "</function>")


class Scan:
    """Looks for the end of a call in a text that grows, at each character once."""

    def __init__(self, place: int, marks: re.Pattern):
        self.place = place
        self.marks = marks
        self.depth = 0  # of brackets
        self.is_quoted = False

    def end(self, text: str) -> int:
        """Where the call ends; 0 if its end has not come."""
        for match in self.marks.finditer(text, self.place):
            self.place = match.end()
            if self.is_end(match[0]):
                return self.place
        self.place = max(self.place, len(text) - len(END_OF_TOOL) - 1)  # a mark may be cut
        return 0

    def is_end(self, mark: str) -> bool:
        if mark == '"':
            self.is_quoted = not self.is_quoted
        elif "parameter" in mark:
            self.is_quoted = mark == "<parameter="
        elif not self.is_quoted:
            self.depth += (mark in ("{", "[")) - (mark in ("}", "]"))
        is_within = self.is_quoted or self.depth
        return mark[:1] in ("", "\n") or (mark in ENDS and not is_within)


KEYS = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"')


def scan_of(text: str, begin: str) -> Scan | None:
    """What finds the end of the call that begins a text; None if more text must come first."""
    rest = text[len(begin) :].lstrip()
    place = len(text) - len(rest)
    if begin == ELEMENT:
        return Scan(place, ELEMENTS)
    if begin == "{" and rest.startswith(KEYS):
        return Scan(0, JSON)
    if not rest or (begin == "{" and any(key.startswith(rest) for key in KEYS)):
        return None
    if begin == TOOL:
        return Scan(place, ELEMENTS if rest[0] == "<" else TAG)
    if begin == MISTRAL and rest[0] not in "[{":  # a name comes first
        place = text.find("{")
        return Scan(place, JSON) if place > 0 else None
    is_json = begin != "{" and rest[0] in "[{"
    return Scan(place, JSON) if is_json else Scan(len(begin), NO_CALL)


# --- what a call says ---

# "name", "name[ARGS]" or "name[CALL_ID]id[ARGS]", and the arguments
NAMED = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
END_OF_PARAMETER = r"\n?(?:</parameter>(?=\s*(?:<parameter=|\Z))|\Z)"
PARAMETER = re.compile(rf"\s*<parameter=([^>\n]+)>\n?(.*?){END_OF_PARAMETER}", re.DOTALL)
decoder = json.JSONDecoder(strict=False)  # some models write line ends in strings


def calls_in(text: str, begin: str, functions: Functions) -> list[tuple[str, Any]]:
    """The names and arguments of the calls in a text that a Scan has found. Raises one of many
    errors if there is none."""
    inner = text.strip()
    if begin not in (ELEMENT, "{"):
        inner = inner.removeprefix(begin).removesuffix(END_OF_TOOL).strip()
    if inner.startswith(ELEMENT):
        return [xml_call(inner, functions, is_whole=text.endswith(END_OF_TOOL))]
    named = NAMED.fullmatch(inner) if begin == MISTRAL else None
    if named:
        return [(named[1], decoder.decode(named[2]))]
    values: list[Any] = []  # an object, a list of objects, or several, one behind the other
    while inner:
        value, end = decoder.raw_decode(inner)
        values += value if isinstance(value, list) else [value]
        inner = inner[end:].lstrip(" \n;,")
    calls = [*map(named_call, values)]
    if not calls or (begin == "{" and calls[0][0] not in functions):
        raise ValueError("JSON that is no call")
    return calls


def named_call(call: dict) -> tuple[str, Any]:
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = call["name"] if "name" in call else call["function"]
    arguments = call.get("arguments")
    return name, call.get("parameters") or {} if arguments is None else arguments


def xml_call(text: str, functions: Functions, is_whole: bool) -> tuple[str, dict]:
    if not (is_whole or text.endswith("</function>")):
        raise ValueError("the call was cut off")
    inner = text.removeprefix(ELEMENT).removesuffix("</function>")
    name, _, body = inner.partition(">")
    schema = functions.get(name, {})
    properties = schema.get("properties") or {}
    arguments = {}
    place = 0
    while match := PARAMETER.match(body, place):
        place = match.end()
        arguments[match[1]] = cast(match[2], properties.get(match[1]), schema)
    if body[place:].strip():
        raise ValueError("text that is no parameter")
    return name, arguments


WORDS = {"true": True, "false": False, "null": None, "none": None}
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
KINDS |= {dict: "object", type(None): "null"}


def cast(text: str, schema: Any, root: dict) -> Any:
    """The value of a parameter that stands as text. The schema says what it is; without one, or if
    the text is nothing of the kind, it stays text."""
    kinds: set[str] = set().union(*map(kinds_of, options_of(schema, root)))
    word = text.strip().lower()
    try:
        value = WORDS[word] if word in WORDS else decoder.decode(text.strip())
    except ValueError:
        return text
    kind = KINDS[type(value)]
    is_right = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if is_right and kind != "string" else text


def options_of(schema: Any, root: dict) -> Iterator[dict]:
    """The schemas of one type each, of which a value matches one."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = reduce(getitem, schema["$ref"].split("/")[1:], root)
    schema = schema if isinstance(schema, dict) else {}
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    for part in parts:
        yield from options_of(part, root)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        for kind in kinds:
            yield {**schema, "type": kind}
    elif not parts:
        yield schema


def kinds_of(option: dict) -> set[str]:
    """The type of a schema; without one, the types of its values."""
    if "type" in option:
        return {option["type"]}
    values = [option["const"]] if "const" in option else option.get("enum", ())
    return {KINDS[type(value)] for value in values}


# --- grammars ---

END_OF_VALUE = '"\\n</parameter>\\n"'


def grammar_of_calls(form: Form, functions: Functions, is_parallel: bool) -> str:
    """A grammar, as Lark writes it, of one call or several."""

    def literal(text: str) -> str:
        """A grammar names special tokens by their ids."""
        tags = "|".join(map(re.escape, form.special)) or "(?!)"
        parts = re.split(f"({tags})", text)
        names = {tag: f"<[{token_id}]>" for tag, token_id in form.special.items()}
        return " ".join(names.get(part, json.dumps(part)) for part in parts if part)

    rules = []
    for i, (name, schema) in enumerate(functions.items()):
        call = form.call.replace('"NAME"', json.dumps(name)).replace("NAME", name)
        begin, end = map(literal, call.split("ARGUMENTS"))
        rules.append(f"call_{i}: {begin} args_{i} {end}")
        if ELEMENT in call:
            rules += xml_rules(i, schema)
        else:
            rules.append(f"args_{i}: %json {json.dumps(schema)}")
    before, *between, after = map(literal, form.calls.split("%"))
    more = f"({between[0]} call)*" if is_parallel and between else ""
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    return "\n".join([f"start: {before} call {more} {after}", f"call: {names}", *rules])


def xml_rules(i: int, schema: dict) -> Iterator[str]:
    """The rules for the parameters of function i: a JSON value, or text up to the end tag."""
    places = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parameters = []
    for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
        names = []
        for k, option in enumerate(options_of(value, schema)):
            name = f"value_{i}_{j}_{k}"
            names.append(name)
            if kinds_of(option) - {"string"}:
                yield f"{name}: {name}_json {END_OF_VALUE}"
                yield f"{name}_json: %json {json.dumps({**option, **places})}"
            else:
                yield f"{name}[lazy]: {name.upper()}"
                yield f"{name.upper()}: ({text_of(option)}) {END_OF_VALUE}"
        begin = json.dumps(f"<parameter={key}>\n")
        may_lack = "" if key in (schema.get("required") or ()) else "?"
        parameters.append(f"({begin} ({' | '.join(names)})){may_lack}")
    yield f"args_{i}: {' '.join(parameters)}"


def text_of(schema: dict) -> str:
    """A terminal for a text that the schema allows: by its values, or its pattern and length."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return " | ".join(json.dumps(str(value)) for value in values)
    size = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    pattern = schema.get("pattern", "").replace("/", "\\/")
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") else "(?s:.*)"
    inner = f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}"
    no_tags = r"~/(?s:.*)<\/?(parameter|function|tool_call)(?s:.*)/"
    return f"/(?s:.{size})/ & /{inner}/ & {no_tags}"
