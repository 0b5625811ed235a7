"""RequestStates: the outputs of unfinished requests, brought up to date from their tokens."""

from __future__ import annotations

from tokenizers import Tokenizer

from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.processing.text import Text
from nanovllm.sequence import Request, Sequence


class RequestState:
    """An unfinished request, and the output that its user sees.

    Everything here can be rebuilt from the tokens of the request's sequences.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        is_reported: bool = True,
    ):
        self.request = request
        self.tokenizer = tokenizer
        self.is_reported = is_reported  # whether `step` returns the output
        self.is_queued = False  # whether the scheduler has got the request
        self.is_unwanted = False  # whether `abort` has been called
        # whether each step updates the output; otherwise the output is made when it is read
        self.is_watched = is_reported or request.is_search or bool(request.params.stop)
        self.output = RequestOutput(
            request.request_id, request.prompt, request.prompt_token_ids, outputs=[]
        )
        self.restart()

    def restart(self) -> None:
        """Forgets everything that was built from the tokens."""
        self.is_updating = False
        request = self.request
        params = request.params
        outputs = [CompletionOutput(i) for i in range(params.n)]
        if params.logprobs is not None:
            for output in outputs:
                output.logprobs = []
        self.texts: list[Text] = []  # of each output
        self.no_text = () if params.include_stop_str_in_output else request.stop_token_ids
        tokenizer = self.tokenizer
        if tokenizer is not None and not request.is_search:
            self.texts = [Text(tokenizer, output, params) for output in outputs]
        self.output.outputs[:] = outputs
        self.output.error = None
        self.output.finished = False

    def update(self) -> list[Sequence]:
        """Brings the output up to date. Returns the sequences that end by their text, because it
        contains a stop string."""
        if self.is_updating:  # the last update was interrupted: all is made again
            self.restart()
        self.is_updating = True
        request = self.request
        ended = []
        if not request.is_search:  # a search has outputs only at its end
            for seq, output in zip(request.sequences, self.output.outputs):
                if self._update_completion(seq, output):
                    ended.append(seq)
        self.output.num_cached_tokens = request.num_cached_tokens or 0
        if request.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = request.prompt_logprobs
        if request.has_ended:
            if request.is_search:
                from nanovllm.processing.beams import results_of  # chapter 13

                self.output.outputs[:] = results_of(request, self.tokenizer)
            self.output.finished = True
        self.is_updating = False
        return ended

    def _update_completion(self, seq: Sequence, output: CompletionOutput) -> bool:
        """Returns whether the sequence ends by its text."""
        was_running = seq.finish_reason is None
        if seq.finish_reason == "stop" and self.request.rules is not None:
            self.request.rules.check(seq)
        num_prompt = len(self.request.prompt_token_ids)
        for token_id in seq.token_ids[num_prompt + len(output.token_ids) :]:
            is_text = bool(self.texts) and token_id not in self.no_text
            # an error is raised at each read
            is_end = is_text and self.texts[output.index].add(token_id)
            output.token_ids.append(token_id)
            if is_end:
                seq.finish_reason = "stop"
                del seq.token_ids[num_prompt + len(output.token_ids) :]  # accepted draft tokens
                break
        if output.logprobs is not None and seq.logprobs is not None:
            new = seq.logprobs[len(output.logprobs) : len(output.token_ids)]
            output.logprobs += new
            first = [next(iter(likeliest.values())) for likeliest in new]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(first)
        if seq.finish_reason is not None:
            self._end(seq, output)
        return was_running and seq.finish_reason is not None

    def _end(self, seq: Sequence, output: CompletionOutput) -> None:
        if self.texts and self.texts[output.index].end():
            seq.finish_reason = "stop"
        output.finish_reason = seq.finish_reason
        own = self.request.user_stop_token_ids
        if seq.finish_reason == "stop" and output.token_ids[-1] in own:
            output.stop_reason = output.stop_reason or output.token_ids[-1]

    def catch_up(self, error: Exception | None = None) -> list[Sequence]:
        """Brings the output up to date, or ends it with the error. Returns the sequences that it
        ends."""
        ended = []
        try:
            ended = self.update()
        except Exception as failure:  # from the tokenizer: no other request is affected
            error = error or failure
        if error is not None:
            self.fail(error)
            ended = self.request.sequences  # some of them may have ended before
        return ended

    def final_output(self) -> RequestOutput:
        """The output of a request that has ended. It is made now, unless each step has updated
        it."""
        if not self.output.finished:
            self.catch_up()
        return self.output

    def fail(self, error: Exception) -> None:
        """Ends the request, whatever its state."""
        for seq in self.request.unfinished:
            seq.finish_reason = "error"
        for output in self.output.outputs:
            output.finish_reason = output.finish_reason or "error"
        self.output.error = error
        self.output.finished = True


class Reader:
    """Reads the output of a request, each part of it once."""

    def __init__(self, state: RequestState):
        self.state = state
        self.num_read = [(0, 0)] * len(state.output.outputs)  # characters and tokens

    def news(self) -> list[CompletionOutput]:
        """Returns the new part of each output since the last call: the text that may be shown, the
        tokens, and at the end the reason. Call it until the output has finished."""
        state = self.state
        if not state.output.finished:
            state.update()
        deltas = []
        for i, output in enumerate(state.output.outputs):
            num_chars, num_tokens = self.num_read[i]
            num_safe = state.texts[i].num_safe_chars if state.texts else len(output.text)
            text = output.text[num_chars:num_safe]
            token_ids = output.token_ids[num_tokens:]
            logprobs = None if output.logprobs is None else output.logprobs[num_tokens:]
            # after a fault an output is made anew, and may be shorter than what was read
            self.num_read[i] = max(num_chars, num_safe), max(num_tokens, len(output.token_ids))
            reasons = (output.finish_reason, output.stop_reason)
            deltas.append(CompletionOutput(i, text, token_ids, logprobs, *reasons))
        return deltas


class RequestStates:
    """The states of all unfinished requests, and the outputs that `step` has not reported yet."""

    def __init__(self) -> None:
        self.unfinished: dict[str, RequestState] = {}  # by request id
        self.unreported: dict[str, RequestOutput] = {}

    def of(self, request: Request) -> RequestState | None:
        """The state of this request, unless it has ended."""
        state = self.unfinished.get(request.request_id)
        return state if state is not None and state.request is request else None

    def report(self, state: RequestState, error: Exception | None = None) -> list[Sequence]:
        """Reports the new tokens of a request, or the error that ends it. Forgets the request once
        it has ended. Returns the sequences that end by their text or by the error."""
        if not state.is_watched and error is None:
            if state.request.has_ended:
                self.unfinished.pop(state.request.request_id, None)
            return []
        output = state.output
        ended = state.catch_up(error)
        if state.is_reported:
            self.unreported[output.request_id] = output
        if output.finished:
            self.unfinished.pop(output.request_id, None)
        return ended

    def take(self) -> list[RequestOutput]:
        """All outputs that have not been reported."""
        taken, self.unreported = self.unreported, {}
        return list(taken.values())
