"""Penalties and biases: changes to the logits of a request before its token is sampled."""

from array import array
from copy import copy
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from nanovllm.sequence import Rules, Sequence
from nanovllm.step import integers, move, tensors_of, with_tensors
from nanovllm.topics.decoding.drafts import without_draft
from nanovllm.topics.decoding.masks import masked_logits
from nanovllm.topics.decoding.rules import TokenCounts


@dataclass
class Adjustments:
    """What changes the logits of B rows: tensors on their device.

    First the biases, each of which is added to one logit. Then, for each token that is in a row's
    text so far, the row's repetition factor; then its other penalties, which are subtracted.
    """

    num_biases: Tensor  # [B] int64: how many of the N biases are a row's
    biases: Tensor  # [N, 2] fp64: token id, bias
    penalties: Tensor  # [B, 3] fp64: repetition, frequency, presence
    num_tokens: Tensor  # [B] int64: how many of the M tokens are a row's
    tokens: Tensor  # [M, 2] int32: a token id, and how often the row's output has it


def adjusted(logits: Tensor, changes: Adjustments) -> Tensor:
    """Changes logits [B, vocab_size] in fp32, in the order of vLLM.

    A factor (Keskar et al., 2019, section 4.1) divides a logit above 0 and multiplies the others.
    """
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    # given their length, a GPU need not be waited for
    rows = torch.repeat_interleave(changes.num_biases, output_size=len(changes.biases))
    ids, biases = changes.biases.T
    flat.index_add_(0, (rows * vocab_size + ids).long(), biases.float())
    rows = torch.repeat_interleave(changes.num_tokens, output_size=len(changes.tokens))
    ids, counts = changes.tokens.T
    places = rows * vocab_size + ids
    factors, frequency, presence = changes.penalties[rows].T
    before = flat[places]
    factors = factors.float()
    after = torch.where(before > 0, before / factors, before * factors)
    penalties = frequency * counts + presence * (counts > 0)
    flat[places] = after - penalties.float()
    return logits


def adjusted_logits(logits: Tensor, seqs: list[Sequence]) -> Tensor:
    """The logits [B, vocab_size] with all biases and penalties, in fp32; the same ones if there are
    none. In place of logits in fp32, if no log-probabilities are wanted of them."""
    adjustments = adjustments_of(seqs)
    if not len(adjustments.biases) + len(adjustments.tokens):  # min_tokens are reached
        return masked_logits(logits, seqs)
    changes = with_tensors(adjustments, move(tensors_of(adjustments), logits.device))
    are_read_again = any(seq.request.num_logprobs is not None for seq in seqs)
    logits = logits.to(torch.float32, copy=are_read_again)
    return masked_logits(adjusted(logits, changes), seqs)


def adjustments_of(seqs: list[Sequence]) -> Adjustments:
    """Collects the biases and penalties of the sequences, given their tokens so far."""
    num_biases = []
    biases = array("d", [0, 0])  # torch.frombuffer refuses an empty one
    penalties = []
    num_tokens = []
    tokens = array("i", [0, 0])
    for seq in seqs:
        own = biases_of(seq)
        num_biases.append(len(own))
        biases.extend(chain.from_iterable(own.items()))
        params = seq.request.params
        penalties.append(
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        )
        rules = seq.request.rules
        counted = array("i")
        if rules is not None and rules.has_penalty:
            counted = counts_of(seq, rules)
        num_tokens.append(len(counted) // 2)
        tokens.extend(counted)
    return Adjustments(
        num_biases=integers(num_biases),
        biases=torch.frombuffer(biases, dtype=torch.float64).view(-1, 2)[1:],
        penalties=torch.tensor(penalties, dtype=torch.float64),
        num_tokens=integers(num_tokens),
        tokens=torch.frombuffer(tokens, dtype=torch.int32).view(-1, 2)[1:],
    )


def biases_of(seq: Sequence) -> dict[int, float]:
    """The biases of a sequence: token id -> what is added to its logit."""
    rules = seq.request.rules
    if rules is None:
        return {}
    if seq.num_output_tokens >= seq.request.params.min_tokens:
        return rules.biases
    return rules.biases | dict.fromkeys(seq.request.stop_token_ids, -torch.inf)


def counts_of(row: Sequence, rules: Rules) -> array:
    seq = without_draft(row)
    counts = rules.counts.get(seq.index)
    if counts is None:
        counts = rules.counts[seq.index] = TokenCounts(seq.request.prompt_token_ids)
    counts.add(seq.token_ids, 1)
    if row is not seq:  # with its draft tokens
        counts = copy(counts)
        counts.places = {**counts.places}
        counts.pairs = counts.pairs[:]
        counts.add(row.token_ids, 1)
    return counts.pairs
