"""What a request returns, and how its tokens become text."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nanovllm.beam_search import BeamSearch
from nanovllm.sequence import Request


@dataclass
class CompletionOutput:
    """One output of a request. It grows while the request runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = (
        None  # per token: the token itself first, then the most likely ones
    )
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    cumulative_logprob: float | None = None  # of all tokens; beam search only


@dataclass
class RequestOutput:
    """What a request returns. It grows while the request runs: what it has is brought up to date when it is read, which
    must be in the thread that calls step()."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    reply: "Reply | None" = field(repr=False)  # until it has finished
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


@dataclass
class TextStream:
    """Turns the tokens of one output into text, and watches for stop strings.

    Text is held back while it ends in an incomplete UTF-8 character (DecodeStream does that) or in a possible beginning
    of a stop string.
    """

    tokenizer: Tokenizer
    output: CompletionOutput
    stop: list[str]
    decoder: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    num_safe_chars: int = 0  # how much of output.text may be shown to the user

    def add(self, token_id: int) -> bool:
        """Appends a token's text. Returns True if it completes a stop string; the text is then cut off before it."""
        text, new = self.output.text, self.decoder.step(self.tokenizer, token_id)
        if not new:
            return False
        self.output.text = text + new
        begin = max(0, len(text) - max(map(len, self.stop), default=0) + 1)
        found = [i for i in (self.output.text.find(stop, begin) for stop in self.stop) if i >= 0]
        if found:
            self.output.text = self.output.text[: min(found)]
        num_held_back = max((overlap(self.output.text, stop) for stop in self.stop), default=0)
        self.num_safe_chars = len(self.output.text) - (0 if found else num_held_back)
        return bool(found)


def overlap(text: str, stop: str) -> int:
    """Number of characters at the end of the text that may be the beginning of the stop string."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    return len(text) - begin if begin >= 0 else 0


class Reply:
    """An unfinished request and what its user sees of it.

    The tokens of the request's sequences are the truth; everything here can be rebuilt from them.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, is_reported: bool, is_watched: bool
    ):
        self.request = request
        self.is_reported = is_reported  # by step(); otherwise the caller holds the output
        self.outputs = [CompletionOutput(i) for i in range(request.params.n)]
        self.output = RequestOutput(
            request.request_id, request.prompt, request.prompt_token_ids, self, self.outputs
        )
        # by a stream, or for stop strings: after each token. Else the output is made when somebody reads it
        self.is_watched = is_watched or bool(request.params.stop) or request.beam_search is not None
        self.tokenizer = tokenizer
        self.restart()

    def restart(self) -> None:
        request, stop = self.request, list(self.request.params.stop or ())
        for output in self.outputs:
            output.token_ids.clear()
            output.logprobs = None if request.params.logprobs is None else []
            output.text = ""
        self.texts: list[TextStream] = []  # of each output
        if self.tokenizer is not None and request.beam_search is None:
            self.texts = [TextStream(self.tokenizer, output, stop) for output in self.outputs]
        self.output.error, self.output.finished, self.output.reply = None, False, self

    def update(self) -> None:
        """Brings the output up to date. Ends a sequence whose text contains a stop string."""
        request = self.request
        if request.beam_search is None:  # the outputs of a search are only known at its end
            for i, (output, seq) in enumerate(zip(self.outputs, request.sequences)):
                for token_id in seq.token_ids[
                    len(request.prompt_token_ids) + len(output.token_ids) :
                ]:
                    is_text = bool(self.texts) and token_id not in request.stop_token_ids
                    if is_text and self.texts[i].add(
                        token_id
                    ):  # if it raises, so does whoever reads next
                        seq.finish_reason = "stop"
                    output.token_ids.append(token_id)
                if output.logprobs is not None and seq.logprobs is not None:
                    output.logprobs += seq.logprobs[len(output.logprobs) : len(output.token_ids)]
                output.finish_reason = seq.finish_reason
        self.output.cached_tokens = request.num_cached_tokens or 0
        if not request.unfinished:
            for text in self.texts:  # what looked like the beginning of a stop string was not one
                text.num_safe_chars = len(text.output.text)
            if request.beam_search is not None:
                self.outputs[:] = beams_of(request, request.beam_search, self.tokenizer)
            self.output.finished, self.output.reply = True, None

    def fail(self, error: Exception) -> None:
        """Ends the request, whatever its state."""
        for seq in self.request.unfinished:
            seq.finish_reason = "error"
        for output in self.outputs:
            output.finish_reason = output.finish_reason or "error"
        self.output.error, self.output.finished, self.output.reply = error, True, None


def beams_of(
    request: Request, search: BeamSearch, tokenizer: Tokenizer | None
) -> list[CompletionOutput]:
    """The results of a beam search, best first."""
    outputs = []
    for i, beam in enumerate(search.best_so_far(request.sequences)):
        token_ids, is_stop = beam.token_ids, beam.token_id in request.stop_token_ids
        reason = (
            "stop" if is_stop else beam.parent.finish_reason if beam.token_id is None else "length"
        )
        text = (
            tokenizer.decode(token_ids[: len(token_ids) - is_stop], skip_special_tokens=True)
            if tokenizer
            else ""
        )
        outputs.append(CompletionOutput(i, text, token_ids, None, reason, beam.cumulative_logprob))
    return outputs
