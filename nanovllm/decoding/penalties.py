"""Penalties and biases: what changes the logits of a request before its token is drawn."""

from array import array
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.sampling_params import SamplingParams
from nanovllm.sequence import Sequence
from nanovllm.step import floats, integers, move, tensors_of, with_tensors


@dataclass
class Adjustments:
    """N changes, each of one logit: tensors [N] on the logits' device.

    First biases, which are added; then factors, which make a token of the text so far less likely;
    then penalties, which are added again. No place is twice among factors, or among penalties.
    """

    rows: Tensor  # int64
    ids: Tensor  # int64
    values: Tensor  # fp32
    num_biases: int
    num_factors: int


def adjusted(logits: Tensor, changes: Adjustments) -> Tensor:
    """logits [B, vocab_size] -> a copy in fp32 with the changes, in the order of vLLM.

    A factor (Keskar et al., 2019, section 4.1) divides a logit above 0 and multiplies the others.
    """
    logits = logits.to(torch.float32, copy=True)
    flat = logits.view(-1)
    places = changes.rows * logits.shape[1] + changes.ids
    num_penalties = len(places) - changes.num_biases - changes.num_factors
    sizes = [changes.num_biases, changes.num_factors, num_penalties]
    biased, repeated, penalized = places.split(sizes)
    biases, factors, penalties = changes.values.split(sizes)
    flat.index_add_(0, biased, biases)
    before = flat[repeated]
    flat[repeated] = torch.where(before > 0, before / factors, before * factors)
    flat.index_add_(0, penalized, penalties)
    return logits


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
        """Adds the values of these token ids in a row."""
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
    """Collects the biases, factors and penalties of the sequences, given their tokens so far."""
    biases = Entries()
    factors = Entries()
    penalties = Entries()
    for row, seq in enumerate(seqs):
        if not seq.request.is_adjusted:
            continue
        params = seq.request.params
        biases.add(row, seq.request.logit_bias)
        if seq.num_output_tokens < params.min_tokens:
            biases.add(row, dict.fromkeys(seq.request.stop_token_ids, -torch.inf))
        if params.repetition_penalty != 1:
            factors.add(row, dict.fromkeys(seq.token_ids, params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(seq.output_token_ids)
            amounts = {i: -penalty(params, count) for i, count in counts.items()}
            penalties.add(row, amounts)
    entries = biases + factors + penalties
    if not entries.ids:  # min_tokens may be reached, and an output may have no tokens
        return None
    return Adjustments(
        rows=integers(entries.rows),
        ids=integers(entries.ids),
        values=floats(entries.values),
        num_biases=len(biases.ids),
        num_factors=len(factors.ids),
    )


def penalty(params: SamplingParams, count: int) -> float:
    """The penalty of a token that the output has `count` times."""
    return params.frequency_penalty * count + params.presence_penalty
