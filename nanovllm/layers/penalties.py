"""Penalties: what changes the logits of a request before its token is drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
