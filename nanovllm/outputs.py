"""What a request returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from nanovllm.beam_search import BeamRequest
from nanovllm.sequence import TokenLogprobs


@dataclass
class CompletionOutput:
    """One output of a request. It grows while the request runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # per token: the token itself, then the likeliest
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    cumulative_logprob: float | None = None  # of all tokens; beam search only


@dataclass
class RequestOutput:
    """What a request returns. It grows while the request runs: what it has is brought up to date
    when it is read, which must be in the thread that calls step(). A copy no longer grows."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    reply: Any = field(repr=False)  # a replies.Reply, until it has finished
    completions: list[CompletionOutput] = field(repr=False)
    cached_tokens: int = field(default=0, repr=False)
    finished: bool = False
    error: Exception | None = None  # the cause, if finish_reason is "error"

    @property
    def outputs(self) -> list[CompletionOutput]:
        if self.reply is not None:
            self.reply.update()
        return self.completions

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache."""
        if self.reply is not None:
            self.reply.update()
        return self.cached_tokens

    def __getstate__(self) -> dict:
        """What copy and pickle keep: all but the engine's side of an unfinished request."""
        if self.reply is not None:
            self.reply.update()
        return {**vars(self), "reply": None}


@dataclass
class Delta:
    """What is new in one output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None  # in the last one


def results_of(request: BeamRequest, tokenizer: Tokenizer | None) -> list[CompletionOutput]:
    """The results of a beam search, best first."""
    outputs = []
    for i, beam in enumerate(request.search.best_so_far(request.sequences)):
        output = CompletionOutput(i, token_ids=beam.token_ids)
        output.cumulative_logprob = beam.cumulative_logprob
        text_ids = beam.token_ids
        output.finish_reason = "length"
        if beam.token_id in request.stop_token_ids:
            output.finish_reason = "stop"
            text_ids = text_ids[:-1]
        elif beam.token_id is None:  # the search was cut short
            output.finish_reason = beam.parent.finish_reason
        if tokenizer is not None:
            output.text = tokenizer.decode(text_ids, skip_special_tokens=True)
        outputs.append(output)
    return outputs
