"""SamplingParams: how the tokens of one request are drawn, and when it ends. Imports no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

from nanovllm.options import (
    ABOVE_0,
    POSITIVE,
    SEED,
    Options,
    Rule,
    integer,
    is_int,
    is_number,
    is_text,
    is_token_id,
    listed,
    number,
)

LARGEST_COUNT = 2**31 - 1  # stands for "all", whatever is counted
SMALLEST_FLOAT32 = 2.0**-126  # the smallest normal number: processors may treat smaller ones as 0


TEXTS = listed(is_text, "a list of strings, none of them empty")
IDS = listed(is_token_id, "a list of token ids")


def is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_int(i, 0) and is_number(bias, -100, 100) for i, bias in value.items()
    )


class RequestParams(Options):
    """Base of SamplingParams and BeamSearchParams (topics/decoding)."""

    sampling_params: Any  # () -> what the scheduler and the sampler read
    new_request: Any  # (*fields) -> a request of another kind


@dataclass(frozen=True, kw_only=True)
class SamplingParams(RequestParams):
    n: int = 1
    """Number of outputs per prompt."""

    temperature: float = 1.0
    """0 means greedy, and so does any value too small to divide by in float32."""

    top_k: int = 0
    """Keep only the k most likely tokens; 0 or -1 keeps all."""

    top_p: float = 1.0
    """Keep only the most likely tokens whose total probability reaches this value, at least one."""

    min_p: float = 0.0
    """Keep only tokens with at least this fraction of the most likely token's probability."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of all tokens that the output has already; below 0 favors them."""

    frequency_penalty: float = 0.0
    """The same, times how often the output has the token."""

    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the output become less likely: their logits are divided by
    it, or multiplied if below 0."""

    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids."""

    max_tokens: int | None = 256
    """Maximum tokens to generate; None is as many as fit."""

    min_tokens: int = 0
    """Before this number of tokens, no stop token is sampled and no stop string ends the output."""

    stop: str | Sequence[str] | None = None
    """Strings that end the output. The text is cut off before them."""

    stop_token_ids: Collection[int] | None = None
    """Tokens that end the output, in addition to the model's end-of-sequence tokens."""

    ignore_eos: bool = False
    """Continue past the model's end-of-sequence tokens."""

    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, in the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    seed: int | None = None
    """The same request with the same seed gives the same tokens, whatever it is batched with; up to
    rounding, see chapter 08."""

    logprobs: int | None = None
    """Return the log-probability of each output token, and of the k most likely tokens at its
    position."""

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Its keys and values are then computed, even if cached."""

    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens are drawn."""

    bad_words: Sequence[str] | None = None
    """No token is drawn that ends one of these words."""

    truncate_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt, at most this number; -1: as many as fit."""

    cache_salt: str | None = None
    """Only requests with the same salt share what the prefix cache has: others cannot measure that
    a prompt is in it."""

    structured_outputs: Options | dict | None = None
    """What the output must match: StructuredOutputsParams, or a dict of its fields."""

    extra_args: dict | None = None
    """For a scheduler of your own: a tenant, a deadline, a class of service. The engine does not
    look at it."""

    RULES: ClassVar[dict[str, Rule]] = {
        "n": POSITIVE,
        "temperature": number(0, 1e6, "0 (greedy) or a number up to 1,000,000"),
        "top_k": Rule(
            lambda value: is_int(value, -1), "a positive integer, or 0 or -1 for all tokens"
        ),
        "top_p": number(ABOVE_0, 1, "above 0 and at most 1"),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0.01, 100),
        "logit_bias": Rule(is_bias, "a dict of token ids with numbers from -100 to 100"),
        "max_tokens": Rule(
            lambda value: value is None or is_int(value, 1),
            "a positive integer, or None; what does not fit is not generated",
        ),
        "min_tokens": integer(0, inf, "an integer from 0 on"),
        "stop": Rule(
            lambda value: is_text(value) or TEXTS.allows(value),
            "a string or a list of strings, none of them empty",
        ),
        "stop_token_ids": listed(is_token_id, IDS.words, list | tuple | set),
        "seed": SEED,
        "logprobs": integer(0, 20),
        "prompt_logprobs": integer(0, 20),
        "allowed_token_ids": Rule(lambda value: IDS.allows(value) and value, IDS.words),
        "bad_words": TEXTS,
        "truncate_prompt_tokens": Rule(
            lambda value: is_int(value, -1) and value != 0, "-1 or a positive integer"
        ),
        "cache_salt": Rule(is_text, "a string that is not empty"),
        "structured_outputs": Rule(
            lambda value: isinstance(value, Options | dict) and value,
            "StructuredOutputsParams or a dict of its fields",
        ),
        "extra_args": Rule(lambda value: isinstance(value, dict), "a dict"),
    }

    CHANGE_LOGITS: ClassVar[list[str]] = (
        "presence_penalty frequency_penalty logit_bias min_tokens "
        "allowed_token_ids bad_words structured_outputs"
    ).split()

    elsewhere: ClassVar[dict[str, str]] = {
        "best_of": "n is the number of outputs; LLM.beam_search finds the most likely ones",
        "use_beam_search": "call LLM.beam_search(prompts, BeamSearchParams(...))",
    }

    def __post_init__(self):
        super().__post_init__()
        if self.temperature < SMALLEST_FLOAT32:
            self.put("temperature", 0.0)
        max_tokens = min(self.max_tokens or LARGEST_COUNT, LARGEST_COUNT)
        is_allowed = self.min_tokens <= max_tokens
        self.require("min_tokens", is_allowed, f"an integer from 0 to {max_tokens=}")
        self.put("max_tokens", max_tokens)
        self.put("top_k", min(self.top_k, LARGEST_COUNT))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.put("stop", tuple(stop or ()))
        self.put("stop_token_ids", tuple(self.stop_token_ids or ()))
        self.put("logit_bias", {**(self.logit_bias or {})})
        self.put("extra_args", {**(self.extra_args or {})})

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before a token is sampled: by penalties, biases or masks."""
        changed = [name for name in self.CHANGE_LOGITS if getattr(self, name)]
        return self.repetition_penalty != 1 or bool(changed)

    def sampling_params(self) -> "SamplingParams":
        """Itself: other kinds of parameters, such as BeamSearchParams, give what they come to."""
        return self

    def clone(self) -> "SamplingParams":
        """A copy. For other values: dataclasses.replace(params, top_k=5)."""
        return replace(self)
