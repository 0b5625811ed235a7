"""Parsing: an answer's text, as it comes, is split into reasoning, content and calls of tools."""

import json
import re
from dataclasses import dataclass, field
from uuid import uuid4

from nanovllm.frontend.text import overlap

THINK = "<think>"
END_OF_THINK = "</think>"
TOOL = "<tool_call>"
END_OF_TOOL = "</tool_call>"


@dataclass
class Parts:
    """What a piece of text adds to each."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict] = field(default_factory=list)


class Parser:
    """Parses one answer. Tags may fall apart: what may become a tag is held back.

    Where the template itself has opened the tag, the answer begins with the reasoning.
    """

    def __init__(self, prompt: str | None, has_tools: bool, most_calls: int | None = None):
        self.most_calls = most_calls  # others are dropped: the client takes no more
        self.text = ""  # that belongs to nothing yet
        self.has_tools = has_tools
        self.num_calls = 0
        is_open = (prompt or "").rstrip().endswith(THINK)
        self.state = "reasoning" if is_open else "start"
        self.skips_newlines = is_open  # those behind a tag

    def add(self, new: str, is_last: bool = False) -> Parts:
        """What is new in each part. If no text follows, nothing is held back any longer."""
        self.text += new
        parts = Parts()
        while self._step(parts):
            pass
        if not is_last:
            return parts
        if self.state == "tool":  # it is no call
            parts.content += TOOL
        if self.state == "reasoning":
            parts.reasoning += self.text
        else:
            parts.content += self.text
        self.text = ""
        return parts

    def _step(self, parts: Parts) -> bool:
        """Moves the first part of the text to where it belongs. False: more must come first."""
        if self.skips_newlines:
            self.text = self.text.lstrip("\n")
            self.skips_newlines = not self.text
        if not self.text:
            return False
        if self.state == "start":
            return self._begin()
        if self.state == "tool":
            return self._call(parts)
        if self.state == "reasoning":
            found, is_over = self._until(END_OF_THINK, "content")
            self.skips_newlines = is_over
            parts.reasoning += found
            return is_over
        if self.has_tools:
            found, is_over = self._until(TOOL, "tool")
            parts.content += found
            return is_over
        parts.content += self.text
        self.text = ""
        return False

    def _begin(self) -> bool:
        """Whether it is known if the answer begins with its reasoning."""
        text = self.text.lstrip()
        if text != THINK and THINK.startswith(text):
            return False
        self.state = "content"
        if text.startswith(THINK):
            self.text = text[len(THINK) :]
            self.state = "reasoning"
            self.skips_newlines = True
        return True

    def _until(self, tag: str, next_state: str) -> tuple[str, bool]:
        """Takes what comes before a tag. Also says whether the tag has come."""
        found, has_tag, rest = self.text.partition(tag)
        if has_tag:
            self.text = rest
            self.state = next_state
            return found, True
        end = len(self.text) - overlap(self.text, tag)
        found = self.text[:end]
        self.text = self.text[end:]
        return found, False

    def _call(self, parts: Parts) -> bool:
        end = self.text.find(END_OF_TOOL)
        while end >= 0 and ends_in_string(self.text[:end]):  # it is a word of an argument
            end = self.text.find(END_OF_TOOL, end + 1)
        if end < 0:
            return False
        inner = self.text[:end]
        self.text = self.text[end + len(END_OF_TOOL) :]
        self.state = "content"
        call = call_of(inner, self.num_calls)
        self.skips_newlines = call is not None
        if call is None:
            parts.content += TOOL + inner + END_OF_TOOL
        elif self.num_calls != self.most_calls:
            parts.tool_calls.append(call)
            self.num_calls += 1
        return True


class ForcedCalls:
    """Parses an answer that consists of calls: the arguments of a named function, or a list of
    calls of any. They are whole at the end only; what was cut off stays text."""

    def __init__(self, name: str | None):
        self.name = name
        self.text = ""
        self.num_calls = 0

    def add(self, new: str, is_last: bool) -> Parts:
        self.text += new
        if not is_last:
            return Parts()
        try:
            found = json.loads(self.text)
        except ValueError:
            return Parts(content=self.text)
        if self.name is not None:
            found = [{"name": self.name, "arguments": found}]
        calls = [call_in(call, i) for i, call in enumerate(found)]
        self.num_calls = len(calls)
        return Parts(tool_calls=calls)


def ends_in_string(text: str) -> bool:
    """Whether a JSON text ends before the end of a string."""
    return re.findall(r'\\.|"', text).count('"') % 2 == 1


def call_of(text: str, index: int) -> dict | None:
    """A call as OpenAI writes it; None if the text is none."""
    try:
        return call_in(json.loads(text), index)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def call_in(call: dict, index: int) -> dict:
    name = call["name"]
    arguments = call.get("arguments")
    if arguments is None:
        arguments = call.get("parameters") or {}  # as some models call them
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()  # half a surrogate pair cannot be sent
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}
