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


class Ops(Protocol):
    # whether shapes alone decide what is launched, so that a CUDA graph may replay it
    CAN_BE_RECORDED: bool
    # whether kernels are compiled when they first run: better before there are requests
    IS_COMPILED: bool

    def layout(self, batch: Batch) -> object:
        """Prepares a step for this backend's attention, once for all layers. The result becomes
        batch.layout before the model runs. It may not refer to the batch."""

    def store_kv(self, k: Tensor, v: Tensor, batch: Batch, layer: int) -> None:
        """Writes a step's keys and values into their slots (paper, section 5.1).

        k and v [T, num_kv_heads, head_dim].
        """

    def paged_attention(self, q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
        """Attention of q [T, num_heads, head_dim] over the cache: the same shape.

        The tests compare it with attention.paged_attention, the plain reference."""

    def copy_blocks(self, kv_cache: KVCache, copies: list[tuple[int, int]]) -> None:
        """Copies [(from block, to block)] in all layers at once (paper, section 5.1).

        No block is both.
        """

    def add_and_norm(self, residual: Tensor, x: Tensor, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """residual + x [T, size], computed in place of the residual, and the norm of this sum."""

    def norm_and_rotate(
        self,
        qkv: Tensor,
        q_norm: Norm,
        k_norm: Norm,
        cos_sin: Tensor,
        sizes: list[int],
    ) -> tuple[Tensor, ...]:
        """Splits qkv [T, num_heads + 2 * num_kv_heads, head_dim] into q, k and v.

        Each head of q and k is normalized, if the model does that, and rotated by the angles of
        cos_sin [T, head_dim], in fp32; the results have the dtype of qkv. `sizes` are the numbers
        of heads of q, k and v.
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
