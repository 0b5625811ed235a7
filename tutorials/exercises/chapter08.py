"""Your answers to the exercises of chapter 08. To check them: python -m tutorials.check 08"""

from collections.abc import Callable

import torch
from torch import Tensor


# --- 08.1 ---
def filtered(
    probs: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> list[float]:
    """The probabilities that a word is drawn from: 0 for what is cut off, and 1 in sum.

    `probs` may be in any order. First comes the temperature, then min_p, top_k (0 keeps all),
    top_p."""
    raise NotImplementedError


# --- 08.2 ---
def gumbel_tokens(
    logits: Tensor,
    seed: Tensor,
    position: Tensor,
    uniform: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """logits [B, vocab_size], seed [B], position [B] -> token ids [B], by the Gumbel trick.

    `uniform(seed, position)` gives a number for each pair of integers: a multiple of 2**-23, from 0
    up to, and without, 1.
    A logit of minus infinity is a token that is cut off."""
    raise NotImplementedError


# --- 08.3 ---
def lowest_kept(probs: Tensor, top_p: float) -> Tensor:
    """probs [B, vocab_size], in float64, 1 in sum -> c [B, 1]: top_p keeps the tokens with
    probs >= c. Without a sort."""
    raise NotImplementedError
