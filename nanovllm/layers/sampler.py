"""Sampling: one token per sequence, for the whole batch at once."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALL = 1024  # tokens of which a row's filters are looked for first


@dataclass
class Sampling:
    """How B sequences draw their tokens: tensors [B] on the logits' device.

    A filter that no sequence uses is None.
    """

    temperature: Tensor  # fp32, 0 is greedy
    seed: Tensor  # int64
    position: Tensor  # int64: length of the sequence now, so that each token draws a new number
    top_k: Tensor | None = None  # int64, vocab_size keeps all
    top_p: Tensor | None = None  # fp32
    min_p: Tensor | None = None  # fp32
    max_top_k: int = 0  # the largest top_k below vocab_size
    all_have_top_k: bool = False  # whether each sequence keeps at most max_top_k tokens


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """[B] numbers in [0, 1) that depend on (seed, position) and nothing else.

    A counter-based generator: the mixing steps of splitmix64 (Steele et al., OOPSLA 2014). With a
    stateful generator, a request's numbers would depend on the batches that it happened to run in.
    """

    def shifted(x, bits):  # logical right shift; int64 has only the arithmetic one
        return (x >> bits) & (2 ** (64 - bits) - 1)

    def mixed(x):
        x = x ^ shifted(x, 30)
        x = x * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed integer
        x = x ^ shifted(x, 27)
        x = x * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        return x ^ shifted(x, 31)

    x = mixed(mixed(seed) + position * -0x61C8864680B583EB)  # 0x9E3779B97F4A7C15
    return shifted(x, 41).float() / 2**23  # 23 bits: u * total < total holds exactly in fp32


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [B, vocab_size] -> token ids [B].

    Temperature is applied first, then the filters min_p, top_k and top_p, in the same order as in
    vLLM. The token is the first at which the cumulative weight passes a uniform random number
    (inverse transform sampling). The sum follows the order of the vocabulary, never a sorted order,
    so that a row's token does not depend on its neighbors.
    """
    lowest, ids = cutoff(logits, sampling)
    if ids is not None and (logits.gather(1, ids[:, -1:]) >= lowest).any():
        ids = None  # others may be kept, too
    if ids is not None:
        ids = ids.sort().values
        logits = logits.gather(1, ids)
    weights = softmax_weights(logits, sampling)
    weights.masked_fill_(logits < lowest, 0)
    cumulative = weights.cumsum(-1)
    # a greedy row takes the first of its highest logits
    number = uniform(sampling.seed, sampling.position) * (sampling.temperature > 0)
    threshold = number.unsqueeze(1) * cumulative[:, -1:]
    # a parallel cumsum may pass it, by rounding, where a weight is 0
    is_behind = (cumulative > threshold) & (weights > 0)
    chosen = is_behind.max(-1, True).indices
    if ids is not None:
        chosen = ids.gather(1, chosen)
    return chosen.squeeze(1)


def cutoff(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The lowest logit [B, 1] that each row keeps. Tokens whose logits are equal are kept together.

    Also the ids [B, k] of the highest logits, sorted by them, if it was enough to look at few.
    """
    if sampling.min_p is sampling.top_k is sampling.top_p is None:
        return torch.full_like(logits[:, :1], -torch.inf), None
    if sampling.top_k is not None and not sampling.all_have_top_k:
        return cutoff_apart(logits, sampling, sampling.top_k), None
    vocab_size = logits.shape[1]
    for k in (sampling.max_top_k if sampling.all_have_top_k else SMALL, vocab_size):
        top, ids = logits.topk(min(k + 8, vocab_size))
        weights = softmax_weights(top, sampling)
        if sampling.top_k is not None:
            rank = torch.ones_like(ids).cumsum(-1)
            weights *= rank <= sampling.top_k.unsqueeze(1)
        if sampling.top_p is not None:  # a token is kept if those before have not reached top_p
            top_p = sampling.top_p.clamp(min=2e-38).unsqueeze(1)
            cumulative = weights.cumsum(-1, dtype=torch.float64)
            total = cumulative[:, -1:]
            if sampling.top_k is None:
                everything = softmax_weights(logits, sampling)
                total = everything.sum(-1, True, dtype=torch.float64)
            is_needed = cumulative - weights < top_p * total
            weights *= is_needed | (top_p >= 1)
        lowest = top.where(weights > 0, torch.inf).amin(-1, True)
        if sampling.all_have_top_k or (sampling.top_k is None and (top[:, -1:] < lowest).all()):
            return lowest, ids
    return lowest, None


def cutoff_apart(logits: Tensor, sampling: Sampling, top_k: Tensor) -> Tensor:
    """The lowest logits [B, 1], if only some rows have a small top_k: else these, too, would sort
    the whole vocabulary."""
    lowest = torch.empty_like(logits[:, :1])
    is_small = top_k <= SMALL
    for rows in (is_small, ~is_small):
        if not rows.any():
            continue
        own = replace(sampling, max_top_k=int(top_k[rows].max()))
        for name, column in vars(sampling).items():
            if isinstance(column, Tensor):
                setattr(own, name, column[rows])
        is_limited = top_k[rows] < logits.shape[1]
        own.all_have_top_k = bool(is_limited.any())
        if not own.all_have_top_k:
            own.top_k = None
        lowest[rows], _ = cutoff(logits[rows], own)
    return lowest


def softmax_weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities as multiples of the highest one, without those that min_p removes."""
    # subtracting the maximum first keeps the result finite at tiny temperatures
    below = logits.float() - logits.amax(-1, True)
    temperature = sampling.temperature.clamp(min=2e-38)  # a greedy row: only the highest remain
    weights = below.div_(temperature.unsqueeze(1)).exp_()
    if sampling.min_p is not None:
        weights *= weights >= sampling.min_p.unsqueeze(1)
    return weights


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities before temperature and filters: the chosen tokens', then the k highest.

    logits [B, vocab_size], token_ids [B] -> (values, ids), both [B, 1 + k].
    """
    logprobs = logits.log_softmax(-1, torch.float32)
    ids = torch.cat([token_ids.unsqueeze(1), logprobs.topk(k).indices], 1)
    return logprobs.gather(1, ids), ids
