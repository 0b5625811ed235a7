"""SamplingParams: how the tokens of one request are drawn, and when it ends. Imports no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from nanovllm.options import Options, is_int, is_number, option

LARGEST_COUNT = 2**31 - 1  # stands for "all", whatever is counted
SMALLEST_FLOAT32 = 2.0**-126  # the smallest normal number: processors may treat smaller ones as 0


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    n: int = option(1, "Number of outputs per prompt.")
    temperature: float = option(
        1.0, "0 means greedy, and so does any value too small to divide by in float32."
    )
    top_k: int = option(0, "Keep only the k most likely tokens; 0 or -1 keeps all.")
    top_p: float = option(
        1.0,
        "Keep only the most likely tokens whose total probability reaches this value, at least "
        "one.",
    )
    min_p: float = option(
        0.0, "Keep only tokens with at least this fraction of the most likely token's probability."
    )
    presence_penalty: float = option(
        0.0,
        "Subtracted from the logits of all tokens that the output has already; below 0 favors "
        "them.",
    )
    frequency_penalty: float = option(0.0, "The same, times how often the output has the token.")
    repetition_penalty: float = option(
        1.0,
        "Above 1, tokens of the prompt and the output become less likely: their logits are "
        "divided by it, or multiplied if below 0.",
    )
    logit_bias: dict[int, float] | None = option(None, "Added to the logits of these token ids.")
    max_tokens: int | None = option(256, "Maximum tokens to generate; None is as many as fit.")
    min_tokens: int = option(
        0, "No stop token is drawn and no stop string is looked for before so many tokens."
    )
    stop: str | Sequence[str] | None = option(
        None, "Strings that end the output. The text is cut off before them."
    )
    stop_token_ids: Collection[int] | None = option(
        None, "Tokens that end the output, in addition to the model's end-of-sequence tokens."
    )
    ignore_eos: bool = option(False, "Continue past the model's end-of-sequence tokens.")
    include_stop_str_in_output: bool = option(
        False, "Leave the stop string, or the text of the stop token, in the text."
    )
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    seed: int | None = option(
        None,
        "The same request with the same seed gives the same tokens, whatever it is batched with.",
    )
    logprobs: int | None = option(
        None,
        "Return the log-probability of each output token, and of the k most likely tokens at "
        "its position.",
    )
    prompt_logprobs: int | None = option(
        None,
        "The same for the prompt's tokens. Its keys and values are then computed, even if cached.",
    )
    allowed_token_ids: Sequence[int] | None = option(None, "Only these tokens are drawn.")
    bad_words: Sequence[str] | None = option(
        None, "No token is drawn that ends one of these words."
    )
    truncate_prompt_tokens: int | None = option(
        None, "Keep so many tokens at the prompt's end, and forget those before; -1 as many as fit."
    )
    structured_outputs: Options | dict | None = option(
        None, "What the output must match: StructuredOutputsParams, or a dict of its fields."
    )
    extra_args: dict | None = option(
        None,
        "For a scheduler of your own: a tenant, a deadline, a class of service. The engine does"
        " not look at it.",
    )

    elsewhere: ClassVar[dict[str, str]] = {
        "best_of": "n is the number of outputs; LLM.beam_search finds the most likely ones",
        "use_beam_search": "call LLM.beam_search(prompts, BeamSearchParams(...))",
    }

    def __post_init__(self):
        self.require("n", is_int(self.n, 1), "a positive integer")
        self._check_filters()
        self._check_penalties()
        self._check_lengths()
        self._check_stops()
        for name, limit in (("seed", 2**63 - 1), ("logprobs", 20), ("prompt_logprobs", 20)):
            value = getattr(self, name)
            is_allowed = value is None or is_int(value, 0, limit)
            self.require(name, is_allowed, f"None or an integer from 0 to {limit}")
        self._check_masks()
        given = self.structured_outputs
        is_given = isinstance(given, Options | dict) and bool(given)
        allowed = "None, StructuredOutputsParams or a dict of its fields"
        self.require("structured_outputs", given is None or is_given, allowed)
        is_dict = self.extra_args is None or isinstance(self.extra_args, dict)
        self.require("extra_args", is_dict, "None or a dict")
        self.put("extra_args", {**(self.extra_args or {})})

    def _check_filters(self) -> None:
        """Checks temperature, top_k, top_p and min_p."""
        is_temperature = is_number(self.temperature, 0, 1e6)
        self.require("temperature", is_temperature, "0 (greedy) or a number up to 1,000,000")
        if self.temperature < SMALLEST_FLOAT32:
            self.put("temperature", 0.0)
        allowed = "a positive integer, or 0 or -1 for all tokens"
        self.require("top_k", is_int(self.top_k, -1), allowed)
        self.put("top_k", min(self.top_k, LARGEST_COUNT))
        is_share = is_number(self.top_p, 0, 1) and self.top_p > 0
        self.require("top_p", is_share, "above 0 and at most 1")
        self.require("min_p", is_number(self.min_p, 0, 1), "from 0 to 1")

    def _check_penalties(self) -> None:
        for name, low, high in (
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("repetition_penalty", 0.01, 100),
        ):
            is_allowed = is_number(getattr(self, name), low, high)
            self.require(name, is_allowed, f"from {low} to {high}")
        bias = {} if self.logit_bias is None else self.logit_bias
        is_bias = isinstance(bias, dict) and all(
            is_int(i, 0) and is_number(value, -100, 100) for i, value in bias.items()
        )
        self.require("logit_bias", is_bias, "a dict of token ids with numbers from -100 to 100")
        self.put("logit_bias", {**bias})

    def _check_lengths(self) -> None:
        """Checks min_tokens and max_tokens, which is an integer afterwards."""
        max_tokens = LARGEST_COUNT if self.max_tokens is None else self.max_tokens
        allowed = "a positive integer, or None; what does not fit is not generated"
        self.require("max_tokens", is_int(max_tokens, 1), allowed)
        max_tokens = min(max_tokens, LARGEST_COUNT)
        self.put("max_tokens", max_tokens)
        allowed = f"an integer from 0 to {max_tokens=}"
        self.require("min_tokens", is_int(self.min_tokens, 0, max_tokens), allowed)

    def _check_stops(self) -> None:
        """Checks stop and stop_token_ids, which are tuples afterwards, and their flags."""
        stop = [] if self.stop is None else self.stop
        if isinstance(stop, str):
            stop = [stop]
        is_list = isinstance(stop, list | tuple)
        is_texts = is_list and all(isinstance(text, str) and text for text in stop)
        self.require("stop", is_texts, "a string or a list of strings, none of them empty")
        self.put("stop", tuple(stop))
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        is_ids = isinstance(ids, list | tuple | set) and all(is_int(i, 0) for i in ids)
        self.require("stop_token_ids", is_ids, "a list of token ids")
        self.put("stop_token_ids", tuple(ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self.require(name, isinstance(getattr(self, name), bool), "True or False")

    def _check_masks(self) -> None:
        """Checks allowed_token_ids, bad_words and truncate_prompt_tokens."""
        ids = self.allowed_token_ids
        is_list = isinstance(ids, list | tuple) and len(ids) > 0
        is_ids = is_list and all(is_int(i, 0) for i in ids or ())
        self.require("allowed_token_ids", ids is None or is_ids, "None or a list of token ids")
        words = [] if self.bad_words is None else self.bad_words
        is_list = isinstance(words, list | tuple)
        is_words = is_list and all(isinstance(word, str) and word for word in words)
        self.require("bad_words", is_words, "a list of strings, none of them empty")
        most = self.truncate_prompt_tokens
        is_count = most in (None, -1) or is_int(most, 1)
        self.require("truncate_prompt_tokens", is_count, "None, -1 or a positive integer")

    def clone(self) -> "SamplingParams":
        """A copy. For other values: dataclasses.replace(params, top_k=5)."""
        return replace(self)
