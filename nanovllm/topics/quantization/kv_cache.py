"""Keys and values in 8 bits, with a scale for each token and KV head.

A row of the cache is the key, or the value, of one token and one KV head: head_dim integers from
-127 to 127, its codes, and behind them the four bytes of its scale, in fp32. A number is its code
times the scale. What moves whole blocks (copies, swapping) need not know what is in a row.
"""

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.layers.kv_cache import CacheShape, KVCache
from nanovllm.options import refusal
from nanovllm.topics.quantization.groups import quantize

SCALE_BYTES = 4


class Int8Shape(CacheShape):
    """Its head_dim counts the four bytes of a scale, too."""

    def new_cache(self, num_blocks: int, device: torch.device) -> KVCache:
        cache = super().new_cache(num_blocks, device)
        return Int8Cache(cache.tensor, cache.states)


class Int8Cache(KVCache):
    """A KVCache of such rows."""

    @staticmethod
    def stored(numbers: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
        """Keys or values [..., head_dim] as rows [..., head_dim + 4].

        What is read from a row with a NaN or an infinity is not finite. The kernels do the same:
        see numba_int8.py and triton_int8.py in layers.
        """
        codes, scales = quantize(numbers)
        codes = codes.nan_to_num_().to(dtype)
        return torch.cat([codes, scales.view(dtype)], -1)

    @staticmethod
    def restored(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [..., head_dim] of rows."""
        codes = rows[..., :-SCALE_BYTES]
        scales = rows.view(torch.float32)[..., -1:]
        return (codes * scales).to(dtype)


def in_int8(config: Config, shape: CacheShape) -> CacheShape:
    """The shape of the KV cache, given that for numbers of the model's dtype. Raises ValueError for
    a head_dim that is not a multiple of 4."""
    if shape.head_dim % SCALE_BYTES:
        problem = f"head_dim is {shape.head_dim}, and must be a multiple of {SCALE_BYTES}"
        raise refusal("kv_cache_dtype", config.kv_cache_dtype, problem)
    head_dim = shape.head_dim + SCALE_BYTES
    return Int8Shape(*shape._replace(head_dim=head_dim, dtype=torch.int8))
