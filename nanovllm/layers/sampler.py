"""Sampling: one token per sequence, for the whole batch at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 1024  # how many of a row's highest logits are looked at first


@dataclass
class Sampling:
    """How B sequences sample their tokens: tensors [B] on the logits' device. A filter that no
    sequence uses is None."""

    temperature: Tensor  # fp32, 0 is greedy
    seed: Tensor  # int64
    position: Tensor  # int64: length of the sequence now, so that each token draws a new number
    top_k: Tensor | None = None  # int64, vocab_size keeps all
    top_p: Tensor | None = None  # fp32
    min_p: Tensor | None = None  # fp32
    max_top_k: int = 0  # the largest top_k below vocab_size
    all_top_k_small: bool = False  # whether each row that draws has a top_k of at most SMALL


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """[B] numbers in [0, 1) that depend on (seed, position) and nothing else.

    A counter-based generator: the mixing steps of splitmix64 (Steele et al., OOPSLA 2014). With a
    stateful generator, a request's numbers would depend on the batches that it happened to run in.

    mixed(mixed(seed) + position * 0x9E3779B97F4A7C15), with mixed: x ^= x >> 30,
    x *= 0xBF58476D1CE4E5B9, x ^= x >> 27, x *= 0x94D049BB133111EB, x ^= x >> 31, all in 64 bits
    without a sign. The number is its upper 23 bits / 2**23. int64 wraps as it should, but its
    shifts to the right copy the sign.
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
    vLLM. torch_sampler.py and triton_sampler.py draw the same tokens without sorting all logits.
    """
    ranked = logits.sort(-1, descending=True).values
    return draw(logits, lowest_kept(ranked, sampling), sampling)


def draw(logits: Tensor, lowest: Tensor, sampling: Sampling) -> Tensor:
    """Samples the token ids [B] among the logits that are at least `lowest` [B, 1].

    The token is the first at which the cumulative weight exceeds a uniform random number (inverse
    transform sampling). The sum follows the order of the vocabulary, never a sorted order, so that
    a row's token does not depend on its neighbors.
    """
    weights = softmax_weights(logits, sampling)
    weights.masked_fill_(logits < lowest, 0)
    cumulative = weights.cumsum(-1)
    # a greedy row takes the first of its highest logits
    number = uniform(sampling.seed, sampling.position) * (sampling.temperature > 0)
    threshold = number.unsqueeze(1) * cumulative[:, -1:]
    # a parallel cumsum may pass it, by rounding, where a weight is 0
    is_behind = (cumulative > threshold) & (weights > 0)
    return is_behind.max(-1).indices


def lowest_kept(ranked: Tensor, sampling: Sampling, total: Tensor | None = None) -> Tensor:
    """The lowest logit [B, 1] that each row keeps. Tokens with equal logits are kept together.

    ranked [B, k]: each row's k highest logits, highest first. total [B, 1]: the sum of all weights,
    if `ranked` has only some of them: after min_p, before top_k. top_p is a share of the weights
    that min_p and top_k have left. A row with top_p = 1 keeps all of these.
    """
    weights = softmax_weights(ranked, sampling)
    if sampling.top_k is not None:
        rank = torch.arange(1, ranked.shape[1] + 1, device=ranked.device)
        weights *= rank <= sampling.top_k.unsqueeze(1)
    if sampling.top_p is not None:  # a token is kept if those before have not reached top_p
        top_p = sampling.top_p.clamp(min=2e-38).unsqueeze(1)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        if total is None:
            total = cumulative[:, -1:]
        is_needed = cumulative - weights < top_p * total
        weights *= is_needed | (top_p >= 1)
    return ranked.where(weights > 0, torch.inf).amin(-1, True)


def softmax_weights(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities as multiples of the highest one in fp32, without those that min_p removes. At
    temperature 0, only the highest logits have a weight."""
    # subtracting the maximum first keeps the result finite at tiny temperatures
    below = logits.float() - logits.amax(-1, True)
    temperature = sampling.temperature.clamp(min=2e-38)  # a greedy row: only the highest remain
    weights = below.div_(temperature.unsqueeze(1)).exp_()
    if sampling.min_p is not None:
        weights *= weights >= sampling.min_p.unsqueeze(1)
    return weights


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities in fp32, before temperature and filters: the chosen tokens', then the k
    highest.

    logits [B, vocab_size], token_ids [B] -> (values, ids), both [B, 1 + k].
    """
    logprobs = logits.log_softmax(-1, torch.float32)
    ids = torch.cat([token_ids.unsqueeze(1), logprobs.topk(k).indices], 1)
    return logprobs.gather(1, ids), ids
