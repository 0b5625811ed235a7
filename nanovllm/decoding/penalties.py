"""Penalties and biases: what changes the logits of a request before its token is drawn."""

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.sequence import Sequence
from nanovllm.step import floats, integers, move, tensors_of, with_tensors


@dataclass
class Adjustments:
    """What changes the logits of B rows: tensors on their device.

    First N biases, each added to one logit. Then, for each of the M tokens that a row's text has so
    far, the row's repetition factor; then its penalties, which are subtracted. Without a penalty, a
    row has none of the M.
    """

    bias_rows: Tensor  # [N] int64
    bias_ids: Tensor  # [N] int64
    biases: Tensor  # [N] fp32
    num_ids: Tensor  # [B] int64: how many of the M are a row's
    ids: Tensor  # [M] int32: distinct tokens, row after row
    counts: Tensor  # [M] int32: how often the row's output has the token
    factors: Tensor  # [B] fp32
    frequency: Tensor  # [B] fp64
    presence: Tensor  # [B] fp64


def adjusted(logits: Tensor, changes: Adjustments) -> Tensor:
    """logits [B, vocab_size] -> a copy in fp32 with the changes, in the order of vLLM.

    A factor (Keskar et al., 2019, section 4.1) divides a logit above 0 and multiplies the others.
    """
    logits = logits.to(torch.float32, copy=True)
    flat = logits.view(-1)
    biased = changes.bias_rows * logits.shape[1] + changes.bias_ids
    flat.index_add_(0, biased, changes.biases)
    # given its length, a GPU need not be waited for
    rows = torch.repeat_interleave(changes.num_ids, output_size=len(changes.ids))
    places = rows * logits.shape[1] + changes.ids
    before = flat[places]
    factors = changes.factors[rows]
    penalties = changes.frequency[rows] * changes.counts
    penalties += changes.presence[rows] * (changes.counts > 0)
    after = torch.where(before > 0, before / factors, before * factors)
    flat[places] = after - penalties.float()
    return logits


def adjusted_logits(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """The logits [B, vocab_size] with all biases and penalties; the same ones if there are none."""
    if not any(seq.request.is_adjusted for seq in seqs):
        return logits
    adjustments = adjustments_of(seqs)
    if not len(adjustments.biases) + len(adjustments.ids):
        return logits  # min_tokens are reached, or an output has no tokens yet
    moved = move(tensors_of(adjustments), logits.device)
    return adjusted(logits, with_tensors(adjustments, moved))


class TokenCounts:
    """The distinct tokens of a sequence, and how often its output has each.

    It is kept from step to step, and then only the new tokens are looked at.
    """

    def __init__(self, prompt_token_ids: list[int]):
        self.places = {token_id: i for i, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self.ids = array("i", self.places)
        self.counts = array("i", bytes(4 * len(self.ids)))
        self.num_tokens = len(prompt_token_ids)  # those that have been looked at

    def catch_up(self, token_ids: list[int]) -> None:
        for token_id in token_ids[self.num_tokens :]:
            place = self.places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
        self.num_tokens = len(token_ids)


def adjustments_of(seqs: list[Sequence]) -> Adjustments:
    """Collects the biases and penalties of the sequences, given their tokens so far."""
    bias_rows = array("q")
    bias_ids = array("q")
    biases = array("f")
    num_ids = [0] * len(seqs)
    ids = array("i")
    counts = array("i")
    for row, seq in enumerate(seqs):
        of_row = biases_of(seq)
        bias_rows.extend([row] * len(of_row))
        bias_ids.extend(of_row)
        biases.extend(of_row.values())
        if seq.request.has_penalty:
            if seq.token_counts is None:
                seq.token_counts = TokenCounts(seq.request.prompt_token_ids)
            seq.token_counts.catch_up(seq.token_ids)
            num_ids[row] = len(seq.token_counts.ids)
            ids.extend(seq.token_counts.ids)
            counts.extend(seq.token_counts.counts)
    params = [seq.request.params for seq in seqs]
    return Adjustments(
        bias_rows=integers(bias_rows),
        bias_ids=integers(bias_ids),
        biases=tensor_of(biases, torch.float32),
        num_ids=integers(num_ids),
        ids=tensor_of(ids, torch.int32),
        counts=tensor_of(counts, torch.int32),
        factors=floats([p.repetition_penalty for p in params]),
        frequency=torch.tensor([p.frequency_penalty for p in params], dtype=torch.float64),
        presence=torch.tensor([p.presence_penalty for p in params], dtype=torch.float64),
    )


def biases_of(seq: Sequence) -> dict[int, float]:
    """What is added to the logits of these tokens."""
    request = seq.request
    if seq.num_output_tokens >= request.params.min_tokens:
        return request.logit_bias
    return request.logit_bias | dict.fromkeys(request.stop_token_ids, -torch.inf)


def tensor_of(numbers: array, dtype: torch.dtype) -> Tensor:
    """[n]. It shares the memory of the numbers, if there are any."""
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.zeros(0, dtype=dtype)
