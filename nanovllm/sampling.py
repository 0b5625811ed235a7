"""Sampling: from the parameters of a step's requests to the tensors that draw their tokens."""

from nanovllm.layers.sampler import Sampling
from nanovllm.sequence import Sequence
from nanovllm.step import floats, integers


def sampling_of(seqs: list[Sequence], vocab_size: int) -> Sampling:
    """How each sequence draws its token."""
    params = [seq.request.params for seq in seqs]
    temperature = floats([p.temperature for p in params])
    top_k = integers([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params])
    top_p = floats([p.top_p for p in params])
    min_p = floats([p.min_p for p in params])
    is_drawn = temperature > 0
    max_top_k = int(top_k[is_drawn].max()) if is_drawn.any() else vocab_size
    return Sampling(
        temperature=temperature,
        seed=integers([seq.seed for seq in seqs]),
        position=integers([len(seq) for seq in seqs]),
        top_k=top_k if (top_k[is_drawn] < vocab_size).any() else None,
        top_p=top_p if (top_p[is_drawn] < 1).any() else None,
        min_p=min_p if (min_p[is_drawn] > 0).any() else None,
        max_top_k=max_top_k if max_top_k < vocab_size else None,
    )
