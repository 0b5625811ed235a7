"""Sampling: from the parameters of a step's requests to the tensors that draw their tokens."""

from array import array
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from nanovllm.layers.penalties import Adjustments, adjusted
from nanovllm.layers.sampler import Sampling
from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm.step import move, tensors_of, with_tensors


def sampling_of(seqs: list[Sequence], vocab_size: int) -> Sampling:
    """How each sequence draws its token."""
    params = [seq.request.params for seq in seqs]
    temperature = floats([p.temperature for p in params])
    top_k = integers([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params])
    top_p = floats([p.top_p for p in params])
    min_p = floats([p.min_p for p in params])
    is_drawn = temperature > 0
    max_top_k = int(top_k[is_drawn].max()) if is_drawn.any() else vocab_size
    return Sampling(
        temperature=temperature,
        seed=integers([seq.seed for seq in seqs]),
        position=integers([len(seq) for seq in seqs]),
        top_k=top_k if (top_k[is_drawn] < vocab_size).any() else None,
        top_p=top_p if (top_p[is_drawn] < 1).any() else None,
        min_p=min_p if (min_p[is_drawn] > 0).any() else None,
        max_top_k=max_top_k if max_top_k < vocab_size else None,
    )


def adjusted_logits(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """The logits [B, vocab_size] with all biases and penalties; the same ones if there are none."""
    if not any(seq.request.is_adjusted for seq in seqs):
        return logits
    adjustments = adjustments_of(seqs)
    if adjustments is None:
        return logits
    moved = move(tensors_of(adjustments), logits.device)
    return adjusted(logits, with_tensors(adjustments, moved))


class Entries:
    """A list of (row, token id, value), as three arrays."""

    def __init__(self) -> None:
        self.rows = array("q")
        self.ids = array("q")
        self.values = array("f")

    def add(self, row: int, values: dict[int, float]) -> None:
        """Of one row: token ids with their values."""
        self.rows.extend([row] * len(values))
        self.ids.extend(values)
        self.values.extend(values.values())

    def __add__(self, other: "Entries") -> "Entries":
        both = Entries()
        both.rows = self.rows + other.rows
        both.ids = self.ids + other.ids
        both.values = self.values + other.values
        return both


def adjustments_of(seqs: list[Sequence]) -> Adjustments | None:
    """What their parameters say of logits, with the tokens that they have now."""
    biases = Entries()
    factors = Entries()
    penalties = Entries()
    for row, seq in enumerate(seqs):
        if not seq.request.is_adjusted:
            continue
        params = seq.request.params
        biases.add(row, params.logit_bias or {})
        if seq.num_output_tokens < params.min_tokens:
            biases.add(row, dict.fromkeys(seq.request.stop_token_ids, -torch.inf))
        if params.repetition_penalty != 1:
            factors.add(row, dict.fromkeys(seq.token_ids, params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(seq.output_token_ids)
            amounts = {i: -penalty(params, count) for i, count in counts.items()}
            penalties.add(row, amounts)
    entries = biases + factors + penalties
    if not entries.ids:  # not yet, or no longer
        return None
    return Adjustments(
        rows=integers(entries.rows),
        ids=integers(entries.ids),
        values=floats(entries.values),
        num_biases=len(biases.ids),
        num_factors=len(factors.ids),
    )


def penalty(params: SamplingParams, count: int) -> float:
    """For a token that the output has so often."""
    return params.frequency_penalty * count + params.presence_penalty


def integers(values: Iterable[int]) -> Tensor:
    """[n] int64, n > 0."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def floats(values: Iterable[float]) -> Tensor:
    """[n] fp32, n > 0."""
    return torch.frombuffer(array("f", values), dtype=torch.float32)
