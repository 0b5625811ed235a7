"""Protocol: what clients of OpenAI's API may send.

A field is supported, or harmless, or refused by its name: nothing that would change the answer is
ignored. `null` is the same as nothing.
"""

import re
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError
from pydantic_core import from_json

from nanovllm.frontend.inputs import Inputs
from nanovllm.options import PromptTooLong, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.errors import BadRequest

MOST_CHOICES = 1024  # of one call
LONGEST_ID = 200
MOST_IDS = 1024  # of tokens that stop, or have a bias
# strings that stop or are forbidden, and their characters in all: each is looked for after each
# token, in the engine's thread
MOST_TEXTS = {"stop": (64, 4096), "bad_words": (256, 4096)}
MOST_PARTS = 50_000  # lists and objects of a body: Python's garbage collector looks at each
# fields with the names and meanings of SamplingParams
SAME = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs", "logit_bias"}
# values of fields that we do not have which ask for what is done anyway
HARMLESS: dict[str, tuple] = {
    "audio": (),
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "functions": ([],),
    "include_obfuscation": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
# the arguments of a function without parameters
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
COMPACT = {"disable_any_whitespace": True}  # a client gets the arguments anew
B = TypeVar("B", bound=BaseModel)

TokenIds = Annotated[list[int], Field(max_length=MOST_IDS)]
Name = Annotated[str, Field(max_length=LONGEST_ID)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    has_form: ClassVar[Any] = False  # whether it asks for a structured output


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # we add none


class CallBody(Strict):
    """What all calls that the model answers take, and what changes no answer."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Body(CallBody):
    """What completions and chats take."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_IDS)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: SkipValidation[str | list[str] | None] = None  # checked below, and by SamplingParams
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    request_id: Name | None = None
    cache_salt: Name | None = None
    return_token_ids: bool | None = None
    structured_outputs: dict | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: SkipValidation[list[str] | None] = None
    truncate_prompt_tokens: int | None = None

    @property
    def has_form(self) -> bool:
        return bool(self.structured_outputs)

    def check(self) -> None:
        """What no single field shows. Raises BadRequest."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is allowed with stream=true only", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
        for name, (most, most_chars) in MOST_TEXTS.items():
            value = getattr(self, name)
            texts = value if isinstance(value, list) else [value]
            num_chars = sum(len(text) for text in texts if isinstance(text, str))
            if len(texts) > most or num_chars > most_chars:
                asked = f"{name} has {len(texts):,} strings with {num_chars:,} characters"
                allowed = f"at most {most} with {most_chars:,} in all are allowed"
                raise BadRequest(f"{asked}: {allowed}", name)

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The model's default parameters with those of the body. Raises ValueError."""
        given = {name: value for name, value in self if name in SAME and value is not None}
        if self.logit_bias:
            wrong = [key for key in self.logit_bias if not is_token_id(key)]
            if wrong:
                problem = f"logit_bias has the keys {shown(wrong)}: they must be token ids"
                raise BadRequest(problem, "logit_bias")
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**{**vars(defaults), **given, **more})


def is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10


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


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[int]

    def told(self, inputs: Inputs) -> dict:
        """Raises ValueError or BadRequest."""
        if inputs.tokenizer is None:
            raise BadRequest("the model has no tokenizer", status=501)
        inputs.check_ids("tokens", self.tokens)
        return {"prompt": inputs.tokenizer.decode(self.tokens)}


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
    # what the schemas refer to, which must be at the root
    shared: dict[str, Any] = {"$defs": {}, "definitions": {}}
    for schema in schemas.values():
        for name, known in shared.items():
            own = schema.get(name)
            for key, definition in own.items() if isinstance(own, dict) else ():
                if known.setdefault(key, definition) != definition:
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
    wanted = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **shared}
    if not may_be_many:
        wanted["maxItems"] = 1
    return {"json": wanted, **COMPACT}


def parsed(kind: type[B], data: bytes) -> B:
    """A body. Raises BadRequest with the first field that is wrong, and without its value.

    The JSON is read first, and then checked: pydantic takes ten times as long for both at once, and
    holds the interpreter's lock.
    """
    num_parts = data.count(b"[") + data.count(b"{")
    if num_parts > MOST_PARTS:
        raise BadRequest(f"the body has {num_parts:,} brackets: at most {MOST_PARTS:,} are allowed")
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:200]}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be an object, and not a {type(body).__name__}")
    return checked(kind, body)


def checked(kind: type[B], body: dict) -> B:
    """The fields that ask for something. Raises BadRequest."""
    wanted = {}
    for name, value in body.items():
        is_harmless = name not in kind.model_fields and value in HARMLESS.get(name, ())
        if value is not None and not is_harmless:
            wanted[name] = value
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    field = path[0][:100] if path else None
    if first["type"] == "extra_forbidden":
        raise BadRequest(f"{'.'.join(path)[:200]} is not supported: leave it out", field)
    raise BadRequest(f"{field or 'the body'}: {first['msg'][:200]}", field)


def in_words(error: ValueError, kind: type[BaseModel]) -> BadRequest:
    """What the engine refuses. Its sentences begin with the field that is wrong."""
    message = str(error)[:1000]
    words = re.findall(r"\w+", message.replace("StructuredOutputsParams", "structured_outputs"))
    names = [word for word in words if word in kind.model_fields]
    is_long = isinstance(error, PromptTooLong)
    code = "context_length_exceeded" if is_long else None
    message += " (the maximum context length)" * is_long  # the words that programs look for
    return BadRequest(message, names[0] if names else None, code=code)
