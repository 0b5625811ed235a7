"""What a request returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm.sequence import TokenLogprobs


@dataclass
class CompletionOutput:
    """One output of a request. It grows while the request runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # per token: the token itself, then the likeliest
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token id or stop string of the parameters
    cumulative_logprob: float | None = None  # of all tokens, if logprobs were requested


@dataclass
class RequestOutput:
    """What a request returns. Steps make it grow until it has finished; a deep copy stays as it
    is."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(repr=False)
    num_cached_tokens: int = 0  # of the prompt: their keys and values came from the prefix cache
    finished: bool = False
    error: Exception | None = None  # the cause, if finish_reason is "error"
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
