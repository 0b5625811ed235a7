"""Sampling: one token per sequence, for the whole batch at once."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    max_top_k: int | None = None  # at most so many tokens are kept by any sequence, if known


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """[B] numbers in [0, 1) that depend on (seed, position) and nothing else.

    A counter-based generator: the mixing steps of splitmix64 (Steele et al., OOPSLA 2014). With a
    stateful generator, a request's numbers would depend on the batches that it happened to run in.
    """

    def shifted(x, bits):  # logical right shift; int64 has only the arithmetic one
        mask = (1 << (64 - bits)) - 1
        return (x >> bits) & mask

    def mixed(x):
        x = x ^ shifted(x, 30)
        x = x * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed integer
        x = x ^ shifted(x, 27)
        x = x * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        return x ^ shifted(x, 31)

    step = position * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15
    x = mixed(mixed(seed) + step)
    return shifted(x, 41).float() / 2**23  # 23 bits: u * total < total holds exactly in fp32


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [B, vocab_size] -> token ids [B].

    Temperature is applied first, then the filters min_p, top_k and top_p, in the same order as in
    vLLM. The token is the one at which the cumulative probability passes a uniform random number
    (inverse transform sampling). The sum follows the order of the vocabulary, never a sorted order,
    so that a row's token does not depend on its neighbors.
    """
    logits = logits.float()
    is_greedy = sampling.temperature == 0
    temperature = torch.where(is_greedy, 1.0, sampling.temperature)
    # subtracting the maximum first keeps the result finite at tiny temperatures
    below = logits - logits.amax(-1, keepdim=True)
    probs = torch.softmax(below / temperature.unsqueeze(1), dim=-1)
    if sampling.min_p is not None:
        highest = probs.amax(-1, keepdim=True)
        lowest = sampling.min_p.unsqueeze(1) * highest
        probs = probs.where(probs >= lowest, 0.0)
    if sampling.top_k is not None or sampling.top_p is not None:
        probs = probs.where(probs >= cutoff(probs, sampling), 0.0)

    cumulative = probs.cumsum(-1)
    number = uniform(sampling.seed, sampling.position)
    threshold = number.unsqueeze(1) * cumulative[:, -1:]
    chosen = (cumulative <= threshold).sum(-1, keepdim=True)
    chosen.clamp_(max=probs.shape[-1] - 1)
    # a parallel cumsum may decrease, by rounding, where probs is 0: never choose such a token
    likeliest = probs.argmax(-1, keepdim=True)
    chosen = torch.where(probs.gather(1, chosen) > 0, chosen, likeliest)
    return torch.where(is_greedy, logits.argmax(-1), chosen.squeeze(1))


def cutoff(probs: Tensor, sampling: Sampling) -> Tensor:
    """The smallest probability [B, 1] that top_k and top_p keep in each row. Ties are kept, too."""
    vocab_size = probs.shape[-1]
    k = min(sampling.max_top_k or vocab_size, vocab_size)
    top = probs.topk(k, dim=-1).values  # sorted, largest first
    is_kept = torch.ones_like(top, dtype=torch.bool)
    if sampling.top_k is not None:
        rank = torch.arange(k, device=top.device)
        is_kept = rank < sampling.top_k.unsqueeze(1)
    if sampling.top_p is not None:  # a token is kept if those before it have not reached top_p
        top_p = sampling.top_p.unsqueeze(1)
        cumulative = top.where(is_kept, 0.0).cumsum(-1)
        before = cumulative - top
        is_needed = before < top_p * cumulative[:, -1:]
        is_kept = is_kept & (is_needed | (top_p >= 1))
        is_kept[:, 0] = True  # a tiny top_p may round to 0 in fp32
    return top.where(is_kept, torch.inf).amin(-1, keepdim=True)


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities before temperature and filters: the chosen tokens', then the k highest.

    logits [B, vocab_size], token_ids [B] -> (values, ids), both [B, 1 + k].
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    top_values, top_ids = logprobs.topk(k, dim=-1)
    chosen_ids = token_ids.unsqueeze(1)
    chosen_values = logprobs.gather(1, chosen_ids)
    values = torch.cat([chosen_values, top_values], dim=1)
    ids = torch.cat([chosen_ids, top_ids], dim=1)
    return values, ids
