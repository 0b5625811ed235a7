"""Ops: the functions of a backend, such as torch_ops, numba_ops, triton_ops and vattention.

On a CPU it is numba_ops, on a GPU triton_ops, and torch_ops where these are missing: `choose_ops`
says so when the model is built. The layers use nothing else that differs between them.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.sampler import Sampling

Norm = nn.RMSNorm | None
Norms = tuple[Norm, Norm]  # of queries and of keys


class Ops(Protocol):
    NAME: str  # as in Config.attention_backend
    # whether shapes alone decide what is launched, so that a CUDA graph may replay it
    CAN_BE_RECORDED: bool
    # whether kernels are compiled when they first run: better before there are requests
    IS_COMPILED: bool

    def layout(self, batch: Batch) -> object:
        """Prepares a step for this backend's attention, once for all layers. The result becomes
        batch.layout before the model runs. It may not refer to the batch."""

    def paged_attention(self, q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
        """Attention of q [T, num_heads, head_dim] over the cache: the same shape.

        The tests compare it with attention.paged_attention, the plain reference."""

    def copy_blocks(self, kv_cache: KVCache, copies: list[tuple[int, int]]) -> None:
        """Copies [(from block, to block)] in all layers at once (paper, section 5.1).

        No block is both.
        """

    def add_and_norm(self, residual: Tensor, x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """residual + x [T, size], computed in place of the residual, and the norm of this sum."""

    def rotate_and_store(
        self, qkv: Tensor, norms: Norms, cos_sin: Tensor, sizes: list[int], batch: Batch, layer: int
    ) -> Tensor:
        """Normalizes and rotates the heads of q and k, and stores k and v: one kernel may do both.

        The functions norm_and_rotate and store_kv in torch_ops.py say how. Returns q. The numbers
        of qkv [T, num_heads + 2 * num_kv_heads, head_dim] may be overwritten.
        """

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 d], gate and up side by side -> silu(gate) * up [T, d]."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Samples token ids [B] from logits [B, vocab_size] in the model's dtype: see
        sampler.sample."""


def try_out(ops: Ops, device: torch.device) -> None:
    """Computes a few numbers. Raises the error of CUDA or Triton if they cannot start."""
    x = torch.ones(1, 32, device=device)
    with torch.cuda.device_of(x):  # Triton launches on the thread's current device
        ops.silu_and_mul(x).tolist()  # waits for the device
