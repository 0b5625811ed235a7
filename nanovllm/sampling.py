"""Sampling: from the parameters of a step's requests to the tensors that draw their tokens."""

from collections.abc import Collection

from nanovllm.layers.sampler import Sampling
from nanovllm.sequence import Sequence
from nanovllm.step import floats, integers


def sampling_of(seqs: Collection[Sequence], vocab_size: int) -> Sampling:
    """How each sequence draws its token."""
    params = [seq.request.params for seq in seqs]
    temperature = floats([p.temperature for p in params])
    counts = []
    for p in params:
        is_filter = 0 < p.top_k < vocab_size
        counts.append(p.top_k if is_filter else vocab_size)
    top_k = integers(counts)
    top_p = floats([p.top_p for p in params])
    min_p = floats([p.min_p for p in params])
    sampling = Sampling(
        temperature=temperature,
        seed=integers([seq.seed for seq in seqs]),
        position=integers([len(seq) for seq in seqs]),
    )
    # a filter counts only where a token is drawn
    is_drawn = temperature > 0
    is_limited = is_drawn & (top_k < vocab_size)
    if is_limited.any():
        sampling.top_k = top_k
        sampling.max_top_k = int(top_k[is_limited].max())
        sampling.all_have_top_k = bool(is_limited.equal(is_drawn))
    if (top_p[is_drawn] < 1).any():
        sampling.top_p = top_p
    if (min_p[is_drawn] > 0).any():
        sampling.min_p = min_p
    return sampling
