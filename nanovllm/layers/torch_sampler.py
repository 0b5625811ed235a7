"""The short cut of the sampler: the filters of most rows keep few tokens, so only few logits are
sorted.

With 16 rows of 151,936 logits, as peaked as a model's, this takes a tenth of the time of
sampler.sample. The tokens are the same.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.layers.sampler import SMALL, Sampling, draw, lowest_kept, softmax_weights


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """See sampler.sample."""
    lowest, ids = cutoff(logits, sampling)
    # others may be equal to the last one, and kept, too
    if ids is None or (logits.gather(1, ids[:, -1:]) >= lowest).any():
        return draw(logits, lowest, sampling)
    ids = ids.sort().values
    chosen = draw(logits.gather(1, ids), lowest, sampling)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def cutoff(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The lowest logit [B, 1] that each row keeps. If a few of the highest logits decided, also
    their ids [B, k], sorted by logit."""
    if sampling.min_p is sampling.top_k is sampling.top_p is None:
        return torch.full_like(logits[:, :1], -torch.inf), None
    vocab_size = logits.shape[1]
    if sampling.all_top_k_small:
        k = sampling.max_top_k + 8  # more, because others may be equal to the last one
        top, ids = logits.topk(min(k, vocab_size))
        return lowest_kept(top, sampling), ids
    if sampling.top_k is not None:
        return cutoff_apart(logits, sampling, sampling.top_k), None
    weights = softmax_weights(logits, sampling)
    total = weights.sum(-1, True, dtype=torch.float64)
    for k in (SMALL + 8, vocab_size):
        top, ids = logits.topk(min(k, vocab_size))
        lowest = lowest_kept(top, sampling, total)
        if (top[:, -1:] < lowest).all():
            return lowest, ids
    return lowest, None


def cutoff_apart(logits: Tensor, sampling: Sampling, top_k: Tensor) -> Tensor:
    """The lowest logits [B, 1], if only some rows have a small top_k: the other rows are sorted
    apart from them."""
    lowest = torch.empty_like(logits[:, :1])
    is_small = top_k <= SMALL
    for rows in (is_small, ~is_small):
        if rows.any():
            own = of_rows(sampling, rows)
            own.max_top_k = int(top_k[rows].max())
            is_limited = top_k[rows] < logits.shape[1]
            own.all_top_k_small = bool(is_limited.any())
            if not own.all_top_k_small:
                own.top_k = None
            lowest[rows], _ = cutoff(logits[rows], own)
    return lowest


def of_rows(sampling: Sampling, rows: Tensor) -> Sampling:
    own = replace(sampling)
    for name, column in vars(sampling).items():
        if isinstance(column, Tensor):
            setattr(own, name, column[rows])
    return own
