"""Streaming: what is new in an output, as it comes."""

from collections.abc import Iterator
from typing import Any

from nanovllm.processing.outputs import CompletionOutput
from nanovllm.processing.states import RequestState
from nanovllm.sequence import Request


class Reader:
    """Reads a state, each part of it once."""

    def __init__(self, state: RequestState):
        self.state = state
        self.num_read = [(0, 0)] * len(state.output.outputs)  # characters and tokens

    def news(self) -> list[CompletionOutput]:
        """What is new in each output since the last call: its text as far as it may be shown, its
        tokens, and at the end the reason. To be called until the output has finished."""
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
    """What LLM.stream returns, for a checked request."""
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
