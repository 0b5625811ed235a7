"""What a request returns, and how its tokens become text."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@dataclass
class CompletionOutput:
    """One output of a request. It grows while the request runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None  # per token: of the token itself, then of the likeliest
    finish_reason: str | None = None  # "stop", "length" or "abort"
    cumulative_logprob: float | None = None  # of all tokens; beam search only


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache
    finished: bool = False


class TextStream:
    """Turns the tokens of one output into text, and watches for stop strings.

    Text is held back while it ends in half a UTF-8 character (DecodeStream does that) or in what may
    become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, output: CompletionOutput, stop: list[str]):
        self.tokenizer, self.output, self.stop = tokenizer, output, stop
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.num_safe_chars = 0  # of output.text: what may be shown to the user

    def add(self, token_id: int) -> bool:
        """Appends a token's text. True if a stop string is complete; the text then ends before it."""
        text, new = self.output.text, self.decoder.step(self.tokenizer, token_id)
        if not new:
            return False
        self.output.text = text + new
        begin = max(0, len(text) - max(map(len, self.stop), default=0) + 1)
        found = [i for i in (self.output.text.find(stop, begin) for stop in self.stop) if i >= 0]
        if found:
            self.output.text = self.output.text[: min(found)]
        held = max(
            (k for stop in self.stop for k in range(1, len(stop)) if self.output.text.endswith(stop[:k])), default=0
        )
        self.num_safe_chars = len(self.output.text) - (0 if found else held)
        return bool(found)

    def release(self) -> None:
        """The output has ended: what looked like the beginning of a stop string was none."""
        self.num_safe_chars = len(self.output.text)
