"""Text: turns tokens into text, and looks for stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from tokenizers import Tokenizer

from nanovllm.processing.outputs import CompletionOutput
from nanovllm.sampling_params import SamplingParams

MOST_TOKENS = 8  # of a text, decoded together


@dataclass
class Text:
    """Turns the tokens of one output into text, and watches for stop strings.

    Text is held back while it ends in an incomplete UTF-8 character or in a possible beginning of a
    stop string. A token's text may depend on the tokens before it, such as a space at the start: so
    the last few tokens are decoded together.
    """

    tokenizer: Tokenizer
    output: CompletionOutput
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)  # those that are text
    begin: int = 0  # the first of the last few tokens, which are decoded together
    known: str = ""  # their text, as far as it is in the output
    num_safe_chars: int = 0  # how much of output.text may be shown to the user

    def __post_init__(self):
        skip = self.params.skip_special_tokens
        self.decode = partial(self.tokenizer.decode, skip_special_tokens=skip)

    def add(self, token_id: int) -> bool:
        """Appends a token's text. Returns True if it completes a stop string, which ends the text:
        the one that begins first. A stop string counts only if a token
        behind the first `min_tokens` completes it."""
        self.token_ids.append(token_id)
        return self._take()

    def end(self) -> bool:
        """Ends the text, and releases what was held back. Of a character that was cut in the
        middle, U+FFFD remains, as `decode` has it. Returns True if this completes a stop string."""
        is_stop = self._take(is_last=True)
        self.num_safe_chars = len(self.output.text)
        return is_stop

    def _take(self, is_last: bool = False) -> bool:
        """Decodes the tokens from `begin` on, and adds what is new behind `known`. If these tokens
        become many, `begin` moves on: by half of them, so that some stay before the next token."""
        decoded = self.decode(self.token_ids[self.begin :])
        if decoded.endswith("\ufffd") and not is_last:  # a part of a character
            return False
        before = len(self.output.text)
        text = self.output.text + decoded[len(self.known) :]
        self.known = decoded
        if len(self.token_ids) - self.begin > MOST_TOKENS:
            self.begin += MOST_TOKENS // 2
            self.known = self.decode(self.token_ids[self.begin :])
        self.num_safe_chars = len(text)
        is_stop = False
        if self.params.stop:
            text, is_stop = self._cut(text, before)
        self.output.text = text
        return is_stop

    def _cut(self, text: str, before: int) -> tuple[str, bool]:
        """The text up to the first stop string that ends behind `before` characters, and whether
        there is one: then it is `output.stop_reason`, and stays in the text if
        `include_stop_str_in_output`. If not, what may be the start of a stop string is not safe to
        show."""
        stops = self.params.stop or ()
        found = []
        if len(self.token_ids) > self.params.min_tokens:
            for stop in stops:
                begin = text.find(stop, max(0, before - len(stop) + 1))
                if begin >= 0:
                    found.append((begin, stop))
        if not found:
            self.num_safe_chars -= max(overlap(text, stop) for stop in stops)
            return text, False
        begin, stop = min(found, key=itemgetter(0))
        self.output.stop_reason = stop
        is_kept = self.params.include_stop_str_in_output
        text = text[: begin + len(stop) if is_kept else begin]
        self.num_safe_chars = len(text)
        return text, True


def overlap(text: str, stop: str) -> int:
    """The number of characters at the end of the text that may be the start of the stop string."""
    begin = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while begin >= 0 and not stop.startswith(text[begin:]):
        begin = text.find(stop[0], begin + 1)
    return len(text) - begin if begin >= 0 else 0
