"""Sampling: one token per sequence, for the whole batch at once."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sampling:
    """How B sequences draw their tokens: tensors [B] on the logits' device. A filter that no sequence uses is None."""

    temperature: Tensor  # fp32, 0 is greedy
    seed: Tensor  # int64
    position: (
        Tensor  # int64: current length of the sequence, so that every token draws a new number
    )
    top_k: Tensor | None = None  # int64, vocab_size keeps all
    top_p: Tensor | None = None  # fp32
    min_p: Tensor | None = None  # fp32
    max_top_k: int | None = (
        None  # an upper bound on the tokens that any sequence keeps, if there is one
    )

    @property
    def tensors(self) -> list[Tensor]:
        every = (self.temperature, self.seed, self.position, self.top_k, self.top_p, self.min_p)
        return [tensor for tensor in every if tensor is not None]

    def with_tensors(self, tensors: list[Tensor]) -> "Sampling":
        """The same with these tensors in place of its own."""
        temperature, seed, position, *others = tensors
        moved = iter(others)
        top_k, top_p, min_p = (
            None if t is None else next(moved) for t in (self.top_k, self.top_p, self.min_p)
        )
        return Sampling(temperature, seed, position, top_k, top_p, min_p, self.max_top_k)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """[B] numbers in [0, 1) that depend on (seed, position) and nothing else.

    A counter-based generator: the mixing steps of splitmix64 (Steele et al., OOPSLA 2014). With a stateful generator, a
    request's numbers would depend on the batches that it happened to run in.
    """

    def shifted(x, bits):  # logical right shift; int64 has only the arithmetic one
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    def mixed(x):
        x = (x ^ shifted(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as a signed integer
        x = (x ^ shifted(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
        return x ^ shifted(x, 31)

    x = mixed(mixed(seed) + position * -0x61C8864680B583EB)  # 0x9E3779B97F4A7C15
    return shifted(x, 41).float() / 2**23  # 23 bits: u * total < total holds exactly in fp32


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [B, vocab_size] -> token ids [B].

    Temperature is applied first, then the filters min_p, top_k and top_p, in the same order as in vLLM. The token is
    the one at which the cumulative probability passes a uniform random number (inverse transform sampling). The sum
    follows the order of the vocabulary, never a sorted order, so that a row's token does not depend on its neighbors.
    """
    logits, greedy = logits.float(), sampling.temperature == 0
    temperature = torch.where(greedy, 1.0, sampling.temperature).unsqueeze(1)
    # subtracting the maximum first keeps the result finite at tiny temperatures
    probs = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    if sampling.min_p is not None:
        probs = probs.where(
            probs >= sampling.min_p.unsqueeze(1) * probs.amax(-1, keepdim=True), 0.0
        )
    if sampling.top_k is not None or sampling.top_p is not None:
        probs = probs.where(probs >= cutoff(probs, sampling), 0.0)
    cumulative = probs.cumsum(-1)
    threshold = uniform(sampling.seed, sampling.position).unsqueeze(1) * cumulative[:, -1:]
    chosen = (cumulative <= threshold).sum(-1, keepdim=True).clamp_(max=probs.shape[-1] - 1)
    # a parallel cumsum may decrease, by rounding, where probs is 0: never choose a token that was filtered out
    chosen = torch.where(probs.gather(1, chosen) > 0, chosen, probs.argmax(-1, keepdim=True))
    return torch.where(greedy, logits.argmax(-1), chosen.squeeze(1))


def cutoff(probs: Tensor, sampling: Sampling) -> Tensor:
    """The smallest probability [B, 1] that top_k and top_p keep in each row. Ties are kept, too."""
    vocab_size = probs.shape[-1]
    top = probs.topk(
        min(sampling.max_top_k or vocab_size, vocab_size), dim=-1
    ).values  # sorted, largest first
    kept = torch.ones_like(top, dtype=torch.bool)
    if sampling.top_k is not None:
        kept = torch.arange(top.shape[-1], device=top.device) < sampling.top_k.unsqueeze(1)
    if sampling.top_p is not None:  # a token is kept if those before it have not reached top_p
        cumulative = top.where(kept, 0.0).cumsum(-1)
        top_p = sampling.top_p.unsqueeze(1)
        kept = kept & ((cumulative - top < top_p * cumulative[:, -1:]) | (top_p >= 1))
        kept[:, 0] = True  # a tiny top_p may round to 0 in fp32
    return top.where(kept, torch.inf).amin(-1, keepdim=True)


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities before temperature and filters: the chosen tokens first, then the k most likely.

    logits [B, vocab_size], token_ids [B] -> (values, ids), both [B, 1 + k].
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    values, ids = logprobs.topk(k, dim=-1)
    chosen = token_ids.unsqueeze(1)
    return torch.cat([logprobs.gather(1, chosen), values], 1), torch.cat([chosen, ids], 1)
