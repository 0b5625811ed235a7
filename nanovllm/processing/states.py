"""RequestStates: the outputs of unfinished requests, brought up to date from their tokens."""

from __future__ import annotations

from collections import deque

from tokenizers import Tokenizer

from nanovllm.processing.outputs import CompletionOutput, RequestOutput
from nanovllm.processing.text import Text, results_of
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
        # brought up to date in each step; otherwise after the request's end, while the device
        # computes the next step, or when a Reader asks for it
        has_stop = bool(request.params.stop)
        self.is_watched = is_reported or has_stop or request.is_search
        outputs = [CompletionOutput(i) for i in range(request.params.n)]
        self.output = RequestOutput(
            request.request_id, request.prompt, request.prompt_token_ids, outputs
        )
        self.restart()

    def restart(self) -> None:
        """Forgets everything that was built from the tokens."""
        self.is_updating = False
        self.is_complete = False  # whether the request has ended, and its whole output is made
        request = self.request
        outputs = self.output.outputs
        for output in outputs:
            output.text = ""
            output.token_ids.clear()
            output.stop_reason = None
            output.cumulative_logprob = None
            if request.params.logprobs is not None:
                output.logprobs = []
        self.texts: list[Text] = []  # of each output
        tokenizer = self.tokenizer
        if tokenizer is not None and not request.is_search:
            self.texts = [Text(tokenizer, output, request.params) for output in outputs]
        self.output.error = None
        self.output.finished = False

    def update(self) -> None:
        """Brings the output up to date. Ends a sequence whose text contains a stop string."""
        if self.is_updating:  # the last update was interrupted: all is made again
            self.restart()
        self.is_updating = True
        request = self.request
        if not request.is_search:  # a search has outputs only at its end
            for i in range(len(self.output.outputs)):
                self._update_completion(i)
        self.output.num_cached_tokens = request.num_cached_tokens or 0
        if request.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = request.prompt_logprobs
        if request.has_ended:
            if request.is_search:
                results = results_of(request, self.tokenizer)  # type: ignore[arg-type]
                self.output.outputs[:] = results
            self.output.finished = True
            self.is_complete = True
        self.is_updating = False

    def _update_completion(self, i: int) -> None:
        output = self.output.outputs[i]
        request = self.request
        seq = request.sequences[i]
        rules = request.rules
        if seq.finish_reason == "stop" and rules and rules.grammar:
            rules.grammar.check(seq)
        num_prompt = len(request.prompt_token_ids)
        stops = () if request.params.include_stop_str_in_output else request.stop_token_ids
        for token_id in seq.token_ids[num_prompt + len(output.token_ids) :]:
            is_text = bool(self.texts) and token_id not in stops
            is_end = is_text and self.texts[i].add(token_id)  # an error is raised at each read
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
        if seq.finish_reason is not None and self.texts and self.texts[i].end():
            seq.finish_reason = "stop"
        output.finish_reason = seq.finish_reason
        if seq.finish_reason == "stop" and output.token_ids[-1] in request.own_stop_token_ids:
            output.stop_reason = output.stop_reason or output.token_ids[-1]

    def catch_up(self, error: Exception | None = None) -> list[Sequence]:
        """Brings the output up to date, or ends it with the error. Returns the sequences that it
        ends."""
        running = self.request.unfinished
        try:
            self.update()
        except Exception as failure:  # from the tokenizer: no other request is affected
            error = error or failure
        if error is not None:
            self.fail(error)
        return [seq for seq in running if seq.finish_reason is not None]

    def fail(self, error: Exception) -> None:
        """Ends the request, whatever its state."""
        for seq in self.request.unfinished:
            seq.finish_reason = "error"
        for output in self.output.outputs:
            output.finish_reason = output.finish_reason or "error"
        self.output.error = error
        self.output.finished = True
        self.is_complete = True


class RequestStates:
    """The states of all unfinished requests, and the outputs that `step` has not reported yet."""

    def __init__(self) -> None:
        self.unfinished: dict[str, RequestState] = {}  # by request id
        self.unreported: dict[str, RequestOutput] = {}
        self.late: deque[RequestState] = deque()  # ended, and their outputs are still to be made

    def of(self, request: Request) -> RequestState | None:
        """The state of this request, unless it has ended."""
        state = self.unfinished.get(request.request_id)
        return state if state is not None and state.request is request else None

    def report(self, state: RequestState, error: Exception | None = None) -> list[Sequence]:
        """Reports the new tokens of a request, or the error that ends it. Forgets the request once
        it has ended. Returns the sequences that end by their text or by the error."""
        output = state.output
        ended: list[Sequence] = []
        if not state.is_watched and error is None and state.request.has_ended:
            self.late.append(state)
            output.finished = True
        else:
            ended = state.catch_up(error)
        if state.is_reported:
            self.unreported[output.request_id] = output
        if output.finished:
            self.unfinished.pop(output.request_id, None)
        return ended

    def catch_up(self) -> None:
        """Builds the outputs that may be late: `generate` reads them only at its end."""
        while self.late:
            self.late[0].catch_up()
            self.late.popleft()

    def take(self) -> list[RequestOutput]:
        """All outputs that have not been reported."""
        taken, self.unreported = self.unreported, {}
        return list(taken.values())
