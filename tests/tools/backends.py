"""Backends as a parameter of tests, and the attention of one beside the plain reference.

Tests import this file. An example that does: pytest tests/core/test_ops.py
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import dense_attention
from extras import needs

from nanovllm.backends import torch_ops
from nanovllm.layers import attention
from nanovllm.layers.batch import Batch
from tutorials.machine import interpreter_problem
from tutorials.measure.batches import random_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROBLEM = interpreter_problem() if DEVICE == "cpu" else None
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def backends(*more: str, numba: int = 1, triton: int = 1) -> pytest.MarkDecorator:
    """Parametrizes a test by backend; `more` may be "reference", see ops_of.

    Without --slow, every n-th variant with numba or Triton runs, and none for n = 0.
    """
    variants: list[Any] = [*more, "torch"]
    for name, every in (("numba", numba), ("triton", triton)):
        slow = pytest.mark.slow(but_every=every) if every else pytest.mark.slow
        variants.append(name if every == 1 else pytest.param(name, marks=slow))
    return pytest.mark.parametrize("backend", variants)


def ops_of(backend: str) -> Any:
    """The module of a backend; skips the test if it cannot run here.

    "reference" stands for the plain attention.
    """
    if backend == "reference":
        return SimpleNamespace(
            layout=lambda batch: None,
            paged_attention=attention.paged_attention,
        )
    if backend != "torch":
        needs(backend)
    if backend == "triton" and PROBLEM is not None:
        pytest.skip(PROBLEM)
    return import_module(f"nanovllm.backends.{backend}_ops")


def device_of(backend: str) -> str:
    """Where attention is compared with the reference: Triton computes on a GPU, if there is one."""
    return DEVICE if backend == "triton" else "cpu"


def move_batch(batch: Batch, device: str, dtype: torch.dtype | None = None) -> None:
    """Moves all tensors. The cache gets the dtype."""
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            setattr(batch, name, value.to(device))
    batch.kv_cache = type(batch.kv_cache)(batch.kv_cache.tensor.to(device, dtype))


def surrounded(part: torch.Tensor) -> torch.Tensor:
    """The same numbers between others, that no product may read: NaN, or all bits of an integer."""
    value = torch.nan if part.is_floating_point() else torch.iinfo(part.dtype).max
    room = torch.full((3, *part.shape), value, dtype=part.dtype, device=DEVICE)
    room[1] = part.to(DEVICE)
    return room[1]


def check_attention(
    backend: str,
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    size: float = 1.0,
    layout: object = None,
    **kwargs,
) -> None:
    """Stores keys and values with PyTorch and attends to them, in a random batch whose unowned slots
    are NaN.

    The cache is compared with the keys and values themselves, the attention with the reference; the
    reference with dense attention. `size` is that of queries; `layout` replaces the backend's own.
    """
    ops, device = ops_of(backend), device_of(backend)
    batch, keys = random_batch(sequences, kv_heads, head_dim, **kwargs)
    lengths, layer = [length for length, _ in sequences], 1
    scale = 1.5 * head_dim**-0.5  # not the default of PyTorch's attention
    move_batch(batch, device, dtype)
    generator = torch.Generator().manual_seed(1)
    q = size * torch.randn(sum(lengths), heads, head_dim, generator=generator)
    q = q.to(device, dtype)
    new = torch.cat([kv[:, layer, -length:] for kv, length in zip(keys, lengths)], dim=1)
    new = new.to(device, dtype)

    stored = batch.kv_cache.tensor.clone()
    stored[:, layer].flatten(1, 2)[:, batch.slot_mapping] = new
    # as in the model, keys and values are views of something larger
    torch_ops.store_kv(*torch.cat([*new], dim=1).split(kv_heads, dim=1), batch, layer)
    assert torch.equal(batch.kv_cache.tensor.nan_to_num(99), stored.nan_to_num(99))

    batch.layout = layout or ops.layout(batch)
    found = ops.paged_attention(q, batch, layer, scale)
    if backend == "reference":
        kvs = [kv[:, layer].to(dtype).float() for kv in keys]
        parts = zip(q.float().split(lengths), kvs)
        expected = torch.cat([dense_attention(x, *kv, scale) for x, kv in parts]).to(dtype)
    else:
        expected = attention.paged_attention(q, batch, layer, scale)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
