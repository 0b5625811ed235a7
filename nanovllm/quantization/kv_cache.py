"""Keys and values in 8 bits, with a scale for each token and KV head.

A row of the cache is the key, or the value, of one token and one KV head: head_dim integers from
-127 to 127, its codes, and behind them the four bytes of its scale, in fp32. A number is its code
times the scale. What moves whole blocks (copies, swapping) need not know what is in a row.
"""

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.options import refusal

SCALE_BYTES = 4
STEP = 1 / 127  # of the largest number of a row
SMALLEST_SCALE = 1e-30  # of a row of zeros


def stored_shape(config: Config, shape: CacheShape) -> CacheShape:
    """The shape of the KV cache, given that for numbers of the model's dtype. Raises ValueError for
    a head_dim that is not a multiple of 4."""
    if config.kv_cache_dtype == "auto":
        return shape
    if shape.head_dim % SCALE_BYTES:
        problem = f"head_dim is {shape.head_dim}, and must be a multiple of {SCALE_BYTES}"
        raise refusal("kv_cache_dtype", config.kv_cache_dtype, problem)
    return shape._replace(head_dim=shape.head_dim + SCALE_BYTES, dtype=torch.int8)


def stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., head_dim] as a cache of this dtype keeps them.

    For int8, these are rows [..., head_dim + 4]. A row with a NaN or an infinity gets a scale that
    is not finite, so what is read from it is not finite, either. The kernels of the backends do the
    same: they divide once per row, and round ties to even.
    """
    if dtype != torch.int8:
        return numbers
    numbers = numbers.float()
    largest = numbers.abs().amax(-1, True)
    scales = (largest * STEP).clamp_(min=SMALLEST_SCALE)
    codes = (numbers * (1 / scales)).round_()
    codes = codes.nan_to_num_().to(dtype)
    return torch.cat([codes, scales.view(dtype)], -1)


def restored(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [..., head_dim] of rows that `stored` has made, in a dtype of floats."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    codes = rows[..., :-SCALE_BYTES]
    scales = rows.view(torch.float32)[..., -1:]
    return (codes * scales).to(dtype)


def fill(rows: Tensor, generator: torch.Generator) -> None:
    """Fills a part of a cache with random numbers."""
    if rows.dtype != torch.int8:
        rows.normal_(generator=generator)
        return
    *shape, size = rows.shape
    numbers = torch.empty(*shape, size - SCALE_BYTES, device=rows.device)
    rows.copy_(stored(numbers.normal_(generator=generator), rows.dtype))
