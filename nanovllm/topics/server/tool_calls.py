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
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any

from nanovllm.processing.text import overlap

END_OF_TOOL = "</tool_call>"
END_OF_FUNCTION = "</function>"
MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")  # of a call that begins
BARE = "{"  # of a model that writes no mark
Functions = dict[str, dict]  # the schema of the arguments of each function
Call = tuple[str, Any]  # name and arguments

MARK = r"(?:<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>)?\s*"
NAME = r"[^\s\[{<]{1,200}"
HEAD = re.compile(
    MARK + r"(?:<function=(?P<tag>[^>\n]+)>|(?=[{\[])"
    rf"|(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{{))"
)
HEAD_PART = re.compile(
    MARK + rf"(?:<[^>\n]{{0,200}}|(?:{NAME}\s*(?:\[[A-Z_]*\]?\s*\w*){{0,2}})?\s*)"
)
BARE_HEAD = re.compile(r'\{\s*"(?:name|type|id|function|parameters|arguments)"')
BARE_PART = re.compile(r'\{\s*(?:"[a-z]*)?')


def may_begin(text: str, mark: str) -> bool:
    """Whether more text must come before it is known if a call begins."""
    return bool((BARE_PART if mark == BARE else HEAD_PART).fullmatch(text))


def head_of(text: str, mark: str) -> re.Match | None:
    """What stands before the arguments, or before the JSON that contains them."""
    if mark == BARE and not BARE_HEAD.match(text):
        return None
    return HEAD.match(text)


# --- where a call ends ---

# what tells where a value of JSON begins or ends; of a number or a word, its first character
JSON = re.compile(
    rf'\\.|\n{END_OF_TOOL}|[{{}}\[\],:"]|(?<![^\s{{}}\[\],:"])[^\s{{}}\[\],:"\\]', re.DOTALL
)
TAGS = re.compile(rf"</parameter>|\n?{END_OF_FUNCTION}|\n?{END_OF_TOOL}")
ENDS_OF_LINE = (f"\n{END_OF_FUNCTION}", f"\n{END_OF_TOOL}")
SPACES = re.compile(r"\s*")


class Scan(ABC):
    """Looks for the end of a call, at each piece of the text once."""

    marks: re.Pattern
    long_marks: tuple[str, ...]  # those that may come in two pieces

    def __init__(self, begin: int):
        self.place = begin

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

    @abstractmethod
    def is_end(self, match: re.Match) -> bool: ...


class JsonScan(Scan):
    """It ends with the outermost bracket; or where a second value comes with no comma before it,
    as behind a quotation mark too many; or, within a string, at an end tag in a line of its own."""

    marks = JSON
    long_marks = ("\\.", f"\n{END_OF_TOOL}")

    def __init__(self, begin: int):
        super().__init__(begin)
        self.depth = 0  # of brackets
        self.is_quoted = False
        self.has_value = False  # since the last comma, colon or opening bracket

    def is_end(self, match: re.Match) -> bool:
        mark = match[0]
        if self.is_quoted:
            self.is_quoted = mark != '"'
            return mark[0] == "\n"
        if mark in ",:":
            self.has_value = False
        elif mark in "}]":
            self.depth -= 1
            self.has_value = True
            return self.depth <= 0
        elif self.has_value:
            return True
        else:
            self.is_quoted = mark == '"'
            self.depth += mark in "{["
            self.has_value = mark not in "{["
        return False


class TagScan(Scan):
    """It ends with an end tag that stands behind `</parameter>`, or behind the name. Elsewhere, end
    tags belong to an argument, but for both in lines of their own: then `</parameter>` lacks."""

    marks = TAGS
    long_marks = ("</parameter>", END_OF_FUNCTION, END_OF_TOOL, *ENDS_OF_LINE)

    def __init__(self, begin: int):
        super().__init__(begin)
        self.begin = begin  # of what is no argument
        self.end_of_line = 0  # behind </function> at the start of a line

    def is_end(self, match: re.Match) -> bool:
        tag = match[0]
        if tag == "</parameter>":
            self.begin = match.end()
        elif SPACES.fullmatch(match.string, self.begin, match.start()):
            return True
        elif tag == ENDS_OF_LINE[0]:
            self.end_of_line = match.end()
        elif tag == ENDS_OF_LINE[1]:
            return self.end_of_line == match.start()
        return False


def scan_of(text: str, mark: str) -> Scan | None:
    """What finds the end of the call that begins a text; None if none begins."""
    head = head_of(text, mark)
    if head is None:
        return None
    return TagScan(head.end()) if head["tag"] else JsonScan(head.end())


# --- what a call says ---

END_OF_PARAMETER = r"\n?(?:</parameter>(?=\s*(?:<parameter=|\Z))|\Z)"
PARAMETER = re.compile(rf"\s*<parameter=([^>\n]+)>\n?(.*?){END_OF_PARAMETER}", re.DOTALL)
decoder = json.JSONDecoder(strict=False)  # some models write line ends in strings


def calls_in(text: str, mark: str, functions: Functions) -> list[Call]:
    """The calls in a text that a Scan has found. Raises one of many errors if there is none."""
    head = head_of(text, mark)
    if head is None:
        raise ValueError("no call begins")
    rest = text[head.end() :].strip()
    if head["tag"]:
        return [(head["tag"], tagged_arguments(rest, functions.get(head["tag"], {})))]
    value = decoder.decode(rest)
    if head["name"]:
        return [(head["name"], value)]
    calls = [*map(named_call, value if isinstance(value, list) else [value])]
    if not calls or (mark == BARE and calls[0][0] not in functions):
        raise ValueError("JSON that is no call")
    return calls


def named_call(call: dict) -> Call:
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = call["name"] if "name" in call else call["function"]
    arguments = call.get("arguments")
    return name, call.get("parameters") or {} if arguments is None else arguments


def tagged_arguments(text: str, schema: dict) -> dict:
    body = text.removesuffix(END_OF_TOOL).rstrip().removesuffix(END_OF_FUNCTION).rstrip("\n")
    if not text.endswith((END_OF_TOOL, END_OF_FUNCTION)):
        raise ValueError("the call was cut off")
    properties = schema.get("properties") or {}
    arguments = {}
    place = 0
    while match := PARAMETER.match(body, place):
        place = match.end()
        arguments[match[1]] = cast(match[2], properties.get(match[1]), schema)
    if body[place:].strip():
        raise ValueError("text that is no parameter")
    return arguments


WORDS = {"true": True, "false": False, "null": None, "none": None}  # also as Python writes them
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
KINDS |= {dict: "object", type(None): "null"}


def cast(text: str, schema: Any, root: dict) -> Any:
    """The value of a parameter that stands as text. The schema says what it is; without one, or if
    the text is nothing of the kind, it stays text."""
    kinds = set().union(*map(kinds_of, options_of(schema, root))) - {"string"}
    word = text.strip()
    try:
        value = WORDS[word.lower()] if word.lower() in WORDS else decoder.decode(word)
    except ValueError:
        return text
    kind = KINDS[type(value)]
    return value if kind in kinds or (kind == "integer" and "number" in kinds) else text


def options_of(schema: Any, root: dict) -> Iterator[dict]:
    """The schemas of which a value matches one: each for one type, or for values that are all
    strings, or all none."""
    schema = schema if isinstance(schema, dict) else {}
    parts = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []
    if "$ref" in schema:
        parts = [reduce(getitem, schema["$ref"].split("/")[1:], root)]
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    for part in parts:
        yield from options_of(part, root)
    for is_text in (True, False):
        some = [value for value in values if isinstance(value, str) == is_text]
        if some:
            yield {"enum": some}
    if not parts and not values:
        kinds = schema.get("type")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            yield {**schema, "type": kind}


def kinds_of(option: dict) -> set[str]:
    """The types of an option; none if its schema does not say."""
    if "enum" in option:
        return {KINDS[type(value)] for value in option["enum"]}
    return {option["type"]} - {None}
