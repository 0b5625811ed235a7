"""Replies: how the tokens of a request become text and outputs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nanovllm.beam_search import BeamRequest, results_of
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Request


@dataclass
class Text:
    """Turns the tokens of one output into text, and watches for stop strings.

    Text is held back while it ends in an incomplete UTF-8 character (DecodeStream does that) or in
    a possible beginning of a stop string.
    """

    tokenizer: Tokenizer
    output: CompletionOutput
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)  # those that are text
    is_incomplete: bool = False  # whether the last token's text is still to come
    num_safe_chars: int = 0  # how much of output.text may be shown to the user

    def __post_init__(self):
        self.decoder = DecodeStream(skip_special_tokens=self.params.skip_special_tokens)
        self.stop = list(self.params.stop or ())

    def add(self, token_id: int) -> bool:
        """Appends a token's text. Returns True if it completes a stop string, which ends the
        text."""
        new = self.decoder.step(self.tokenizer, token_id)
        self.token_ids.append(token_id)
        self.is_incomplete = not new
        return self._append(new) if new else False

    def end(self) -> bool:
        """No token follows: nothing is held back any longer. Of a character that was cut in the
        middle, U+FFFD remains, as `decode` has it. Returns True if this completes a stop string."""
        is_stop = False
        if self.is_incomplete:
            self.is_incomplete = False
            skip = self.params.skip_special_tokens
            text = self.tokenizer.decode(self.token_ids, skip_special_tokens=skip)
            if text.startswith(self.output.text):
                is_stop = self._append(text[len(self.output.text) :])
        self.num_safe_chars = len(self.output.text)
        return is_stop

    def _append(self, new: str) -> bool:
        before = len(self.output.text)
        text = self.output.text + new
        found = []
        if len(self.token_ids) > self.params.min_tokens:
            for stop in self.stop:
                begin = text.find(stop, max(0, before - len(stop) + 1))
                if begin >= 0:
                    found.append((begin, stop))
        num_held_back = 0
        if found:
            begin, stop = min(found, key=itemgetter(0))
            self.output.stop_reason = stop
            is_kept = self.params.include_stop_str_in_output
            text = text[: begin + len(stop) if is_kept else begin]
        else:
            num_held_back = max((overlap(text, stop) for stop in self.stop), default=0)
        self.output.text = text
        self.num_safe_chars = len(text) - num_held_back
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
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        is_reported: bool = True,
        is_watched: bool = False,
    ):
        self.request = request
        self.tokenizer = tokenizer
        self.is_reported = is_reported  # by step(); otherwise the caller holds the output
        # looked at after each token; otherwise the output is made when somebody reads it
        has_stop = bool(request.params.stop)
        self.is_watched = is_watched or has_stop or isinstance(request, BeamRequest)
        self.may_be_late = not self.is_reported and not self.is_watched
        self.completions = [CompletionOutput(i) for i in range(request.params.n)]
        self.output = RequestOutput(
            request.request_id, request.prompt, request.prompt_token_ids, self, self.completions
        )
        self.restart()

    def restart(self) -> None:
        """Forgets all that was made from the tokens."""
        self.is_updating = False
        request = self.request
        for output in self.completions:
            output.text = ""
            output.token_ids.clear()
            output.stop_reason = None
            output.cumulative_logprob = None
            if request.params.logprobs is not None:
                output.logprobs = []
        self.texts: list[Text] = []  # of each output
        tokenizer = self.tokenizer
        if tokenizer is not None and not isinstance(request, BeamRequest):
            self.texts = [Text(tokenizer, output, request.params) for output in self.completions]
        self.output.error = None
        self.output.finished = False
        self.output.reply = self

    def update(self) -> None:
        """Brings the output up to date. Ends a sequence whose text contains a stop string."""
        if self.is_updating:  # the last update was interrupted: all is made again
            self.restart()
        self.is_updating = True
        request = self.request
        if not isinstance(request, BeamRequest):  # a search has outputs only at its end
            for i in range(len(self.completions)):
                self._update_completion(i)
        self.output.cached_tokens = request.num_cached_tokens or 0
        if request.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = request.prompt_logprobs
        if request.has_ended:
            if isinstance(request, BeamRequest):
                self.completions[:] = results_of(request, self.tokenizer)
            self.output.finished = True
            self.output.reply = None
        self.is_updating = False

    def _update_completion(self, i: int) -> None:
        output = self.completions[i]
        request = self.request
        seq = request.sequences[i]
        begin = len(request.prompt_token_ids) + len(output.token_ids)
        stops = () if request.params.include_stop_str_in_output else request.stop_token_ids
        for token_id in seq.token_ids[begin:]:
            is_text = bool(self.texts) and token_id not in stops
            if is_text and self.texts[i].add(token_id):  # if it raises, so does whoever reads next
                seq.finish_reason = "stop"
            output.token_ids.append(token_id)
        if output.logprobs is not None and seq.logprobs is not None:
            new = seq.logprobs[len(output.logprobs) : len(output.token_ids)]
            output.logprobs += new
            first = [next(iter(likeliest.values())) for likeliest in new]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(first)
        if seq.finish_reason is not None and self.texts and self.texts[i].end():
            seq.finish_reason = "stop"
        output.finish_reason = seq.finish_reason
        if seq.finish_reason == "stop" and output.token_ids[-1] in request.own_stop_token_ids:
            output.stop_reason = output.stop_reason or output.token_ids[-1]

    def catch_up(self, error: Exception | None = None) -> None:
        """Brings the output up to date, or ends it with the error."""
        try:
            self.update()
        except Exception as failure:  # from the tokenizer: no other request is affected
            error = error or failure
        if error is not None:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the request, whatever its state."""
        for seq in self.request.unfinished:
            seq.finish_reason = "error"
        for output in self.completions:
            output.finish_reason = output.finish_reason or "error"
        self.output.error = error
        self.output.finished = True
        self.output.reply = None


class Replies:
    """The replies to all unfinished requests, and what step() has not reported yet."""

    def __init__(self) -> None:
        self.unfinished: dict[str, Reply] = {}  # by request id
        self.unreported: dict[str, RequestOutput] = {}
        self.late: deque[Reply] = deque()  # ended, and their outputs are still to be made

    def to(self, request: Request) -> Reply | None:
        """The reply to this request, unless it has ended."""
        reply = self.unfinished.get(request.request_id)
        return reply if reply is not None and reply.request is request else None

    def report(self, reply: Reply, error: Exception | None = None) -> None:
        """Reports what is new about a request, or the error that ends it. Forgets the request once
        it has ended."""
        output = reply.output
        if reply.may_be_late and reply.request.has_ended and error is None:
            self.late.append(reply)
            output.finished = True
        else:
            reply.catch_up(error)
        if reply.is_reported:
            self.unreported[output.request_id] = output
        if output.finished:
            self.unfinished.pop(output.request_id, None)

    def catch_up(self) -> None:
        """Makes the outputs that may be late: whoever waits for them reads them at the end."""
        while self.late:
            self.late[0].catch_up()
            self.late.popleft()

    def take(self) -> list[RequestOutput]:
        """All that has not been reported. If a Ctrl-C comes in here, the next call returns it."""
        taken = self.unreported.copy()  # another thread may add to it meanwhile
        try:
            for request_id in taken:
                self.unreported.pop(request_id, None)
            return list(taken.values())
        except BaseException:
            self.unreported |= taken
            raise
