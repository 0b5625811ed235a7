"""Qwen3-MoE: DenseModel with experts, small MLPs of which each token uses a few.

A router chooses the experts of a token. The pairs of a token and an expert are sorted by expert:
see layers/experts.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers import experts
from nanovllm.layers.experts import Pairs, Stack
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.models.dense import DenseModel, check_supported


def check_experts(hf_config) -> None:
    """Raises ValueError for a config that check_supported refuses, or whose experts make no
    sense."""
    check_supported(hf_config)
    names = ("num_experts", "moe_intermediate_size", "decoder_sparse_step", "num_experts_per_tok")
    for name in names:
        most = hf_config.num_experts if name == "num_experts_per_tok" else 2**31
        value = getattr(hf_config, name)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name}={value!r} is not an integer from 1 to {most}")


def has_experts(hf_config, layer: int) -> bool:
    """Whether this layer has experts. The other layers have one MLP, as in a dense model."""
    if layer in hf_config.mlp_only_layers:
        return False
    return (layer + 1) % hf_config.decoder_sparse_step == 0


class Router(Linear):
    """Chooses the experts of each token. Its weight is never quantized: a code that is off by one
    would choose another expert."""

    is_router = True

    def __init__(self, hf_config):
        super().__init__(hf_config.hidden_size, hf_config.num_experts)
        self.top = hf_config.num_experts_per_tok
        self.is_normalized = hf_config.norm_topk_prob

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [T, in] -> the weights of the chosen experts, fp32 [T, top], and the experts, int64
        [T, top]. Of experts with equal logits, the first ones are chosen."""
        logits = super().forward(x)
        weights = logits.float().softmax(-1)
        weights, chosen = weights.sort(dim=-1, descending=True, stable=True)
        weights = weights[:, : self.top]
        chosen = chosen[:, : self.top]
        if self.is_normalized:
            weights = weights / weights.sum(-1, True)
        return weights, chosen


class Experts(nn.Module):
    """The experts of a layer. Its result is a sum, to which each rank of tensor parallelism
    contributes (chapter 18)."""

    def __init__(self, hf_config, ops: Ops):
        super().__init__()
        self.ops = ops
        hidden = hf_config.hidden_size
        size = hf_config.moe_intermediate_size
        count = hf_config.num_experts
        product = choose_product(ops.NAME)
        self.gate_up_proj = Stack(hidden, {"gate_proj": size, "up_proj": size}, count, product)
        self.down_proj = Stack(size, {"down_proj": hidden}, count, product)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden_size], weights and chosen experts [T, top] -> [T, hidden_size]."""
        chosen, order = chosen.flatten().sort(stable=True)
        every = torch.arange(self.gate_up_proj.num_experts, device=x.device)
        ends = torch.searchsorted(chosen, every, right=True)
        of_tokens = Pairs(order // weights.shape[1], ends)
        gate_up = self.gate_up_proj(x, of_tokens)
        middle = self.ops.silu_and_mul(gate_up)
        of_pairs = Pairs(torch.arange(len(order), device=x.device), ends)
        y = self.down_proj(middle, of_pairs)
        # back in the order of tokens, so that a token's sum does not depend on the other tokens
        y = torch.empty_like(y).index_copy_(0, order, y)
        parts = y.view(*weights.shape, -1)
        parts = parts * weights.unsqueeze(-1)
        total = parts[:, 0].clone()
        for i in range(1, weights.shape[1]):
            total += parts[:, i]
        return total.to(x.dtype)


class SparseMLP(nn.Module):
    """Takes the place of MLP. The names are those of the checkpoint."""

    def __init__(self, hf_config, ops: Ops):
        super().__init__()
        self.gate = Router(hf_config)
        self.experts = Experts(hf_config, ops)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        return self.experts(x, weights, chosen)


class OneByOne:
    """The tensors of a file, one for each matrix of each expert, as in Qwen's files. transformers
    can also write the matrices of all experts of a layer as one tensor: gate_up_proj
    [num_experts, 2 * size, hidden_size] and down_proj [num_experts, hidden_size, size]."""

    def __init__(self, tensors: Any):
        self.tensors = tensors
        self.places: dict[str, tuple] = {}  # by the name of a matrix
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            prefix, _, kind = name.rpartition(".")
            shape: list[int] = []
            if prefix.endswith(".experts"):
                stored = tensors.get_slice(name)
                shape = [*stored.shape] if isinstance(stored, Tensor) else stored.get_shape()
            if len(shape) != 3:
                self.places[name] = name, ...
                continue
            parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            size = shape[1] // len(parts)
            for expert in range(shape[0]):
                for i, part in enumerate(parts):
                    rows = slice(i * size, (i + 1) * size)
                    self.places[f"{prefix}.{expert}.{part}.weight"] = name, (expert, rows)

    def keys(self) -> list[str]:
        return [*self.places]

    def get_tensor(self, name: str) -> Tensor:
        stored, place = self.places[name]
        if place is ...:
            return self.tensors.get_tensor(stored)
        return self.tensors.get_slice(stored)[place]

    def get_slice(self, name: str) -> Any:
        """A tensor of which a rank reads a part."""
        stored, place = self.places[name]
        return self.tensors.get_slice(stored) if place is ... else self.get_tensor(name)


class ExpertsModel(DenseModel):
    """DenseModel, in which a SparseMLP replaces the MLP of some layers."""

    check = staticmethod(check_experts)
    view = staticmethod(OneByOne)

    def __init__(self, hf_config, rope: Tensor, ops: Ops):
        super().__init__(hf_config, rope, ops)
        for i, layer in enumerate(self.model.layers):
            if has_experts(hf_config, i):
                layer.mlp = SparseMLP(hf_config, ops)  # on the meta device: the MLP had no memory


def choose_product(backend: str) -> Callable:
    """The grouped product of a backend: x [T, in], matrices [E, out, in] and pairs -> [P, out]."""
    if backend == "numba":
        from nanovllm.layers import numba_experts

        return numba_experts.product
    if backend == "triton":
        from nanovllm.layers import triton_experts

        return triton_experts.product
    return experts.product
