"""SamplingParams: how the tokens of one request are drawn, and when it ends. Imports no torch."""

from dataclasses import dataclass, replace
from typing import ClassVar

from nanovllm.options import Options, is_int, is_number

LARGEST_COUNT = 2**31 - 1  # stands for "all", whatever is counted
SMALLEST_FLOAT32 = 2.0**-126  # the smallest normal number: processors may treat smaller ones as 0


@dataclass(kw_only=True)
class SamplingParams(Options):
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
    max_tokens: int = 256
    """Maximum tokens to generate."""
    stop: str | list[str] | None = None
    """Strings that end the output. The text is cut off before them."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence tokens."""
    seed: int | None = None
    """The same request with the same seed gives the same tokens, whatever it is batched with."""
    logprobs: int | None = None
    """Return the log-probability of each output token, and of the k most likely tokens at its
    position."""
    extra_args: dict | None = None
    """For a scheduler of your own: a tenant, a deadline, a class of service. The engine does not
    look at it."""

    elsewhere: ClassVar[dict[str, str]] = {
        "best_of": "n is the number of outputs; LLM.beam_search finds the most likely ones",
        "use_beam_search": "call LLM.beam_search(prompts, BeamSearchParams(...))",
    }

    def __post_init__(self):
        self.require("n", is_int(self.n, 1), "a positive integer")
        self._check_filters()
        allowed = "a positive integer; what does not fit into max_model_len is not generated"
        self.require("max_tokens", is_int(self.max_tokens, 1), allowed)
        self.max_tokens = min(self.max_tokens, LARGEST_COUNT)
        self._check_stops()
        for name, limit in (("seed", 2**63 - 1), ("logprobs", 20)):
            value = getattr(self, name)
            is_allowed = value is None or is_int(value, 0, limit)
            self.require(name, is_allowed, f"None or an integer from 0 to {limit}")
        is_dict = self.extra_args is None or isinstance(self.extra_args, dict)
        self.require("extra_args", is_dict, "None or a dict")
        self.extra_args = {**(self.extra_args or {})}

    def _check_filters(self) -> None:
        """Of temperature, top_k, top_p and min_p."""
        is_temperature = is_number(self.temperature, 0, 1e6)
        self.require("temperature", is_temperature, "0 (greedy) or a number up to 1,000,000")
        if self.temperature < SMALLEST_FLOAT32:
            self.temperature = 0.0
        allowed = "a positive integer, or 0 or -1 for all tokens"
        self.require("top_k", is_int(self.top_k, -1), allowed)
        self.top_k = min(self.top_k, LARGEST_COUNT)
        is_share = is_number(self.top_p, 0, 1) and self.top_p > 0
        self.require("top_p", is_share, "above 0 and at most 1")
        self.require("min_p", is_number(self.min_p, 0, 1), "from 0 to 1")

    def _check_stops(self) -> None:
        """Of stop, stop_token_ids, which are lists afterwards, and ignore_eos."""
        stop = [] if self.stop is None else self.stop
        if isinstance(stop, str):
            stop = [stop]
        is_list = isinstance(stop, list | tuple)
        is_texts = is_list and all(isinstance(text, str) and text for text in stop)
        self.require("stop", is_texts, "a string or a list of strings, none of them empty")
        self.stop = list(stop)
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        is_ids = isinstance(ids, list | tuple | set) and all(is_int(i, 0) for i in ids)
        self.require("stop_token_ids", is_ids, "a list of token ids")
        self.stop_token_ids = list(ids)
        self.require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")

    def clone(self) -> "SamplingParams":
        """A copy, checked again."""
        return replace(self)
