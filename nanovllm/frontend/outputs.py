"""What a request returns."""

from __future__ import annotations

from collections.abc import Callable
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
    """What a request returns. It grows while the request runs: what it has is brought up to date
    when it is read, which must be in the thread that calls step(). A copy no longer grows."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[CompletionOutput] = field(repr=False)
    cached_tokens: int = field(default=0, repr=False)
    finished: bool = False
    error: Exception | None = None  # the cause, if finish_reason is "error"
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
    update: Callable[[], None] | None = field(default=None, repr=False)  # until it has finished

    @property
    def outputs(self) -> list[CompletionOutput]:
        if self.update is not None:
            self.update()
        return self.completions

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache."""
        if self.update is not None:
            self.update()
        return self.cached_tokens

    def __getstate__(self) -> dict:
        """What copy and pickle keep: all but the engine's side of an unfinished request."""
        if self.update is not None:
            self.update()
        return {**vars(self), "update": None}
