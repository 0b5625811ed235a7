"""Formats: how clients of OpenAI's API ask for an answer in a form of their own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanovllm.server.errors import BadRequest
from nanovllm.server.protocol import Strict

# the arguments of a function without parameters
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
COMPACT = {"disable_any_whitespace": True}  # a client gets the arguments anew


class Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # its name and description
    schema_: dict[str, Any] | bool = Field(True, alias="schema")


class Format(Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @property
    def wanted(self) -> dict[str, Any] | None:
        """What SamplingParams.structured_outputs gets. Raises BadRequest."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            problem = 'json_schema goes with type "json_schema" only, and is needed there'
            raise BadRequest(f"response_format: {problem}", "response_format")
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        return {"json_object": True} if self.type == "json_object" else None


class Named(Strict):
    name: str


class CallNamed(Strict):
    """A function that the model must call."""

    type: Literal["function"]
    function: Named


def forced_calls(choice: Any, tools: list[dict], may_be_many: bool) -> dict[str, Any]:
    """What makes the answer one call of the named function: its arguments; or a list of calls of
    any. Raises BadRequest."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    schemas = {name: one.get("parameters", NOTHING) for name, one in functions.items()}
    if isinstance(choice, CallNamed):
        name = choice.function.name
        if name not in schemas:
            problem = f"tool_choice names {name[:200]!r}, which is none of the tools"
            raise BadRequest(problem, "tool_choice")
        return {"json": schemas[name], **COMPACT}
    shared: dict[str, Any] = {}  # what the schemas refer to, which must be at the root
    for schema in schemas.values():
        for key, definition in schema.get("$defs", {}).items():
            if shared.setdefault(key, definition) != definition:
                problem = f"the tools define {key[:200]!r} in two ways"
                raise BadRequest(f"tool_choice: {problem}", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    wanted = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": shared}
    if not may_be_many:
        wanted["maxItems"] = 1
    return {"json": wanted, **COMPACT}
