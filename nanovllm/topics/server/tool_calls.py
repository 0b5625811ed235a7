"""Tool calls: looks for the end of a call in a text that grows, and reads the call.

Models write calls in many forms. A call begins with a mark or, in some models, with nothing. Then
JSON has the name of the function and the arguments, or the name stands before the arguments:

- Qwen: `<tool_call> {"name": "f", "arguments": {...}} </tool_call>`; SmolLM2 writes a list there
- Qwen3-Coder, Qwen3.5: `<tool_call> <function=f> <parameter=KEY> VALUE </parameter> </function>`
- Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]` or `[TOOL_CALLS]f[ARGS]{...}`
- Llama: `{"name": "f", "parameters": {...}}`, perhaps behind `<|python_tag|>`
"""

import json
import re
from functools import reduce
from operator import getitem
from typing import Any

from nanovllm.processing.text import overlap

END_OF_TOOL = "</tool_call>"
END_OF_FUNCTION = "</function>"
END_OF_PARAMETER = "</parameter>"
FUNCTION = "<function="
MARKS = ("<tool_call>", FUNCTION, "[TOOL_CALLS]", "<|python_tag|>")  # of a call that begins
BARE = re.compile(r'\{\s*"(?:name|type|id|function|parameters|arguments)"')  # without a mark
BARE_CUT = re.compile(r'\{\s*(?:"[a-z]*)?\Z')
Functions = dict[str, dict]  # the schema of the arguments of each function
Call = tuple[str, Any]  # name and arguments

# --- where a call ends ---

# what tells where a value of JSON begins or ends; of a number or a word, its first character
JSON = re.compile(
    rf'\\.|\n{END_OF_TOOL}|[{{}}\[\],:"]|(?<![^\s{{}}\[\],:"])[^\s{{}}\[\],:"\\]', re.DOTALL
)
TAGS = re.compile(f"{END_OF_PARAMETER}|{END_OF_FUNCTION}|{END_OF_TOOL}")
OF_FUNCTION = re.compile(f"{FUNCTION}[^>\n]*")
SPACES = re.compile(r"\s*")


class JsonScan:
    """Looks for the end of a call in JSON, at each piece of the text once. It is the end of the
    outermost bracket; or a second value with no comma before it, as behind a quotation mark too
    many; or, within a string, an end tag in a line of its own."""

    marks = JSON
    long_marks: tuple[str, ...] = ("\\.", f"\n{END_OF_TOOL}")  # they may come in two pieces

    def __init__(self, begin: int):
        self.begin = begin  # of what is no argument yet
        self.place = begin
        self.depth = 0  # of brackets
        self.is_quoted = False
        self.has_value = False  # since the last comma, colon or opening bracket

    def end(self, text: str) -> int:
        """Where the call ends; 0 if its end has not come. A text that can be no call has an end,
        too: nothing behind it is held back."""
        for match in self.marks.finditer(text, self.place):
            self.place = match.end()
            if self.is_end(match):
                return self.place
        num_kept = max(overlap(text, mark) for mark in self.long_marks)
        self.place = max(self.place, len(text) - num_kept)
        return 0

    def is_end(self, match: re.Match) -> bool:
        mark = match[0]
        if mark[0] == "\n":
            return True
        if self.is_quoted:
            self.is_quoted = mark != '"'
        elif mark in ",:" or (mark == "]" and not self.depth):
            self.has_value = False
        elif mark in "}]":
            self.depth -= 1
            self.has_value = True
            return self.depth <= 0
        elif self.has_value and (self.depth or mark not in "{["):
            return True
        elif self.has_value and mark == "[":
            self.has_value = False  # of [ARGS], behind the name
        else:
            self.is_quoted = mark == '"'
            self.depth += mark in "{["
            self.has_value = mark not in "{["
        return False


class TagScan(JsonScan):
    """Looks for the end of a call in tags: an end tag behind that of a parameter, or behind the
    name. Elsewhere it is a part of an argument."""

    marks = TAGS
    long_marks = (END_OF_PARAMETER, END_OF_FUNCTION, END_OF_TOOL)

    def is_end(self, match: re.Match) -> bool:
        if match[0] in (END_OF_FUNCTION, END_OF_TOOL):
            return bool(SPACES.fullmatch(match.string, self.begin, match.start()))
        self.begin = match.end()
        return False


def scan_of(text: str, mark: str) -> JsonScan | None:
    """What finds the end of the call that begins a text; None if more text must come first."""
    begin = len(mark) if mark in MARKS and mark != FUNCTION else 0
    rest = text[begin:].lstrip()
    if FUNCTION.startswith(rest) or OF_FUNCTION.fullmatch(rest):
        return None
    head = OF_FUNCTION.match(rest)
    return TagScan(len(text) - len(rest) + head.end() + 1) if head else JsonScan(begin)


# --- what a call says ---

# "name", "name[ARGS]" or "name[CALL_ID]id[ARGS]", and the arguments
NAMED = re.compile(r"([^\s\[{<]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
PARAMETER = re.compile(
    rf"\s*<parameter=([^>\n]+)>\n?(.*?)\n?(?:{END_OF_PARAMETER}(?=\s*(?:<parameter=|\Z))|\Z)",
    re.DOTALL,
)
decoder = json.JSONDecoder(strict=False)  # some models write line ends in strings


def calls_in(text: str, mark: str, functions: Functions, is_forced: bool) -> list[Call]:
    """The calls in a text whose end was found. Raises one of many errors if there is none."""
    inner = text.removeprefix(mark).strip() if mark in MARKS else text
    if mark == FUNCTION or inner.startswith(FUNCTION):
        name, _, rest = inner.removeprefix(FUNCTION).partition(">")
        return [(name, tagged_arguments(rest, functions.get(name, {}), is_forced))]
    named = NAMED.fullmatch(inner)
    if named:
        return [(named[1], decoder.decode(named[2]))]
    value = decoder.decode(inner)
    calls = [*map(named_call, value if isinstance(value, list) else [value])]
    if not calls or (mark not in MARKS and calls[0][0] not in functions):
        raise ValueError("JSON that is no call")
    return calls


def named_call(call: dict) -> Call:
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = call["name"] if "name" in call else call["function"]
    arguments = call.get("arguments")
    return name, call.get("parameters") or {} if arguments is None else arguments


def tagged_arguments(text: str, schema: dict, is_forced: bool) -> dict:
    """The arguments of a call in tags. In a forced call each is JSON, else perhaps a text."""
    body = text.removesuffix(END_OF_TOOL).rstrip().removesuffix(END_OF_FUNCTION).rstrip("\n")
    if not text.endswith((END_OF_TOOL, END_OF_FUNCTION)):
        raise ValueError("the call was cut off")
    properties = schema.get("properties") or {}
    arguments = {}
    place = 0
    while match := PARAMETER.match(body, place):
        place = match.end()
        key, value = match.groups()
        if is_forced:
            arguments[key] = decoder.decode(value)
        else:
            arguments[key] = cast(value, properties.get(key), schema)
    if body[place:].strip():
        raise ValueError("text that is no parameter")
    return arguments


WORDS = {"true": True, "false": False, "null": None, "none": None}  # also as Python writes them
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
KINDS |= {dict: "object", type(None): "null"}


def cast(text: str, schema: Any, root: dict) -> Any:
    """The value of a parameter that stands as text. The schema says what it is; without one, or if
    the text is nothing of the kind, it stays text."""
    kinds = kinds_of(schema, root) - {"string"}
    word = text.strip()
    try:
        value = WORDS[word.lower()] if word.lower() in WORDS else decoder.decode(word)
    except ValueError:
        return text
    kind = KINDS[type(value)]
    return value if kind in kinds or (kind == "integer" and "number" in kinds) else text


def kinds_of(schema: Any, root: dict) -> set[str]:
    """The types that the values of a schema may have; none if the schema does not say."""
    schema = schema if isinstance(schema, dict) else {}
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
    if "$ref" in schema:
        parts = [reduce(getitem, schema["$ref"].split("/")[1:], root)]
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    kinds = schema.get("type") or []
    found = {kinds} if isinstance(kinds, str) else {*kinds}
    found.update(KINDS[type(value)] for value in values)
    return found.union(*(kinds_of(part, root) for part in parts))
