"""Protocol: the fields that all bodies of OpenAI's API have in common. A field is supported, or it
is ignored because it changes no answer, or it is refused by its name. `null` is the same as no
field. Each list and text has a limit (a cap), so that no call can stop the others for long."""

import json
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from nanovllm.processing.inputs import Inputs
from nanovllm.sampling_params import SamplingParams
from nanovllm.topics.server.errors import Refused

MOST_CHOICES = 16  # `n`
MOST_IDS = 1024  # of tokens that stop, or have a bias
BYTES_OF_A_VALUE = 32  # in a body as long as is allowed, without token ids
DEEPEST = 128  # values within values
encode_strictly = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# fields with the names and meanings of SamplingParams
SAME = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs", "logit_bias"}
# values of fields that we do not have which ask for what is done anyway
HARMLESS: dict[str, tuple] = {
    "audio": (),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "functions": ([],),
    "include_obfuscation": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
}
# fields that change nothing
IGNORED = (
    "metadata prompt_cache_key prompt_cache_retention safety_identifier service_tier store user"
).split()

TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # a name of a JSON object
TokenIds = Annotated[list[int], Field(max_length=MOST_IDS)]
Word = Annotated[str, Field(max_length=256)]  # each is looked for after each token


def check_values(body: dict, most: int) -> None:
    """Raises Refused if the fields of a body have more than `most` JSON values, or if the values
    are too deep, or if an answer could not repeat them."""
    num_values = 0
    for name, value in body.items():
        depth = 0
        level = [value]
        while level:
            level = [*chain.from_iterable(map(parts_of, level))]
            depth += 1
            num_values += len(level)
            if num_values > most:
                allowed = f"at most {most:,} are allowed"
                raise wrong(name, f"has {num_values:,} JSON values or more, {allowed}")
            if depth > DEEPEST:
                raise wrong(name, f"has values within values, more than {DEEPEST} deep")
    if can_be_sent(body):
        return
    name = next(name for name in body if not can_be_sent({name: body[name]}))
    raise wrong(name, "has NaN, Infinity or half of a surrogate pair: JSON has none of them")


def wrong(name: str, problem: str) -> Refused:
    field = ascii(name)[1:-1][:100]
    return Refused(f"{field} {problem}", field or None)


def can_be_sent(body: dict) -> bool:
    try:
        encode_strictly(body).encode()
    except ValueError:
        return False
    return True


def parts_of(value: Any) -> Iterable:
    if isinstance(value, dict):
        return chain(value, value.values())
    return value if isinstance(value, list) else ()


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        names = {field.alias or name for name, field in cls.model_fields.items()}
        wanted = {}
        for name, value in body.items():
            is_harmless = name not in names and value in HARMLESS.get(name, ())
            if value is not None and name not in IGNORED and not is_harmless:
                wanted[name] = value
        unknown = [name for name in wanted if name not in names]
        if unknown and cls.model_config["extra"] == "forbid":  # pydantic makes an error of each
            raise PydanticCustomError("extra_forbidden", "unknown fields", {"unknown": unknown})
        return wanted


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Strict):
    """The fields that completions and chats share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Word | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(max_length=MOST_IDS)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Word | Annotated[list[Word], Field(max_length=16)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    cache_salt: Word | None = None
    structured_outputs: dict | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[Word], Field(max_length=64)] | None = None
    truncate_prompt_tokens: int | None = None

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The model's default parameters with those of the body. Raises ValueError or Refused."""
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is allowed with stream=true only", "stream_options")
        given = {name: value for name, value in self if name in SAME and value is not None}
        if self.seed == -1:  # for vLLM: none
            del given["seed"]
        if self.logit_bias:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        wanted = {**vars(defaults), **given, **more}
        return SamplingParams(**wanted)


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: list[int]

    def told(self, inputs: Inputs) -> dict:
        """Raises ValueError."""
        inputs.check_ids("tokens", self.tokens)
        return {"prompt": inputs.tokenizer.decode(self.tokens)}
