"""Ops: all that a backend is, such as torch_ops, numba_ops and triton_ops, or vattention's.

On a CPU it is numba_ops, on a GPU triton_ops, and torch_ops where these are missing: `choose_ops`
says so when the model is built. Nothing else differs between them, and no code asks for a NAME to
choose a function.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape, KVCache
from nanovllm.layers.linear import Groups, Quantized
from nanovllm.layers.sampler import Sampling

Norm = nn.RMSNorm | None
Norms = tuple[Norm, Norm]  # of queries and of keys


class Ops(Protocol):
    NAME: str  # as in Config.attention_backend, for messages
    # whether kernels are compiled when they first run: better before there are requests
    COMPILES_AT_FIRST_USE: bool

    # --- every model ---

    def product_for(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        """F.linear, or what computes it faster with weights that are not quantized."""

    def layout(self, batch: Batch) -> object:
        """Prepares a step for this backend's attention, once for all layers. The result becomes
        batch.layout before the model runs. It may not refer to the batch."""

    def paged_attention(self, q: Tensor, batch: Batch, layer: int, scale: float) -> Tensor:
        """Attention of q [T, num_heads, head_dim] over the cache: the same shape.

        The tests compare it with attention.paged_attention, the plain reference."""

    def copy_blocks(self, kv_cache: KVCache, copies: Tensor) -> None:
        """Copies blocks in all layers at once (paper, section 5.1). `copies` [n, 2], int64 on the
        device, has the block that is copied and the one that is written. No block is both."""

    def add_and_norm(
        self,
        residual: Tensor,
        x: Tensor,
        norm: nn.RMSNorm,
    ) -> tuple[Tensor, Tensor]:
        """residual + x [T, size], computed in place of the residual, and the norm of this sum."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        norms: Norms,
        cos_sin: Tensor,
        sizes: list[int],
        batch: Batch,
        layer: int,
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

    def cache_shape(self, shape: CacheShape, limits: Any, device: torch.device) -> Any:
        """The shape of the KV cache that this backend reads: usually the same, or a VirtualShape
        with the same methods (chapter 20)."""

    def recorder(self, model: nn.Module, kv_cache: KVCache, limits: Any) -> Any:
        """A Recorder (step.py) for steps of this model: CUDA graphs on a GPU, one call on a CPU.
        None if each operation is launched by itself."""

    # --- models with experts, weights in few bits, layers with states ---

    def grouped_product(self, x: Tensor, matrices: Tensor, pairs: Any) -> Tensor:
        """x [T, in], matrices [E, out, in], Pairs -> [P, out]: see experts.product."""

    def experts(self) -> Any:
        """A module that chooses experts and adds them up: its functions are `choose` and `add_up`
        in experts.py."""

    def quantized_product(self, weight: Groups, num_experts: int | None) -> Quantized:
        """The product with a weight in 8 or 4 bits, kept as this backend reads it fastest: see
        topics/quantization/groups.py. With experts, the weight has the matrices of all of them, one
        below the other: the product is the grouped product."""

    def delta_rule(self, *inputs: Any) -> Tensor:
        """What a layer with states computes between its products: takes a GatedDeltaNet, and what
        delta_layer in topics/hybrid/delta.py takes."""


def try_out(ops: Ops, device: torch.device) -> None:
    """Computes a few numbers. Raises the error of CUDA or Triton if they cannot start."""
    x = torch.ones(1, 32, device=device)
    with torch.cuda.device_of(x):  # Triton launches on the thread's current device
        ops.silu_and_mul(x).tolist()  # waits for the device
