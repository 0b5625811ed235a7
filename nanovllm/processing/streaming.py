"""Streaming: yields the new parts of an output while it grows."""

from collections.abc import Iterator
from typing import Any

from nanovllm.processing.outputs import CompletionOutput
from nanovllm.processing.states import RequestState
from nanovllm.sequence import Request


class Reader:
    """Reads the output of a request, each part of it once."""

    def __init__(self, state: RequestState):
        self.state = state
        self.num_read = [(0, 0)] * len(state.output.outputs)  # characters and tokens

    def news(self) -> list[CompletionOutput]:
        """Returns the new part of each output since the last call: the text that may be shown, the
        tokens, and at the end the reason. Call it until the output has finished."""
        state = self.state
        if not state.is_complete:
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


def stream(llm: Any, request: Request) -> Iterator[str]:
    """The generator of LLM.stream, for a checked request."""
    try:
        state = llm._submit(request, is_reported=False)
        reader = Reader(state)
        is_last = False
        while not is_last:
            is_last = state.output.finished
            with llm.turns.take():
                (delta,) = reader.news()
            if delta.text:
                yield delta.text
            elif not is_last:  # no other caller's step has brought text meanwhile
                llm.step(report=False)
    finally:  # perhaps in the garbage collector, in any thread
        llm.inbox.unwanted.append(request)
    if state.output.error is not None:
        raise state.output.error
