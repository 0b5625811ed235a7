"""Beams: the outputs of a request that is a beam search."""

from typing import Any

from tokenizers import Tokenizer

from nanovllm.processing.outputs import CompletionOutput


def results_of(request: Any, tokenizer: Tokenizer | None) -> list[CompletionOutput]:
    """The results of a BeamRequest, best first."""
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
