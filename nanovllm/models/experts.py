"""Qwen3-MoE: DenseModel with experts, small MLPs of which each token uses a few.

A router chooses the experts of a token. The pairs of a token and an expert are sorted by expert:
see layers/experts.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.experts import Pairs, Stack
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.models.dense import DenseModel, check_supported


def check_experts(hf_config) -> Any:
    """Returns a config. Raises ValueError if check_supported refuses it, or if its experts make no
    sense."""
    check_supported(hf_config)
    names = ("num_experts", "moe_intermediate_size", "decoder_sparse_step", "num_experts_per_tok")
    for name in names:
        most = hf_config.num_experts if name == "num_experts_per_tok" else 2**31
        value = getattr(hf_config, name)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name}={value!r} is not an integer from 1 to {most}")
    return hf_config


def has_experts(hf_config, layer: int) -> bool:
    """Whether this layer has experts. The other layers have one MLP, as in a dense model."""
    if layer in hf_config.mlp_only_layers:
        return False
    return (layer + 1) % hf_config.decoder_sparse_step == 0


class Router(Linear):
    """Chooses the experts of each token. Its weight is never quantized: a code that is off by one
    would choose another expert."""

    def __init__(self, hf_config):
        super().__init__(hf_config.hidden_size, hf_config.num_experts)
        self.top = hf_config.num_experts_per_tok
        self.is_normalized = hf_config.norm_topk_prob


class Experts(nn.Module):
    """The experts of a layer. Its result is a sum, to which each rank of tensor parallelism
    contributes (chapter 18)."""

    def __init__(self, hf_config, ops: Ops):
        super().__init__()
        self.ops = ops
        hidden = hf_config.hidden_size
        size = hf_config.moe_intermediate_size
        count = hf_config.num_experts
        self.num_experts = count
        of_gate_up = {"gate_proj": size, "up_proj": size}
        of_down = {"down_proj": hidden}
        product = ops.grouped_product
        self.gate_up_proj = Stack(hidden, of_gate_up, count, product)
        self.down_proj = Stack(size, of_down, count, product)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden_size], weights and chosen experts [T, top] -> [T, hidden_size]."""
        chosen, order = chosen.flatten().sort(stable=True)
        every = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(chosen, every, right=True)
        gate_up = self.gate_up_proj(x, Pairs(order, ends, weights.shape[1]))
        middle = self.ops.silu_and_mul(gate_up)
        y = self.down_proj(middle, Pairs(order, ends, 0))
        return self.ops.experts().add_up(y, weights)


class SparseMLP(nn.Module):
    """Takes the place of MLP. The names are those of the checkpoint."""

    def __init__(self, hf_config, ops: Ops):
        super().__init__()
        self.ops = ops
        self.gate = Router(hf_config)
        self.experts = Experts(hf_config, ops)

    def forward(self, x: Tensor) -> Tensor:
        router = self.gate
        logits = router(x)
        weights, chosen = self.ops.experts().choose(logits, router.top, router.is_normalized)
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

    checked = staticmethod(check_experts)
    view = staticmethod(OneByOne)

    def __init__(self, hf_config, rope: Tensor, ops: Ops):
        super().__init__(hf_config, rope, ops)
        for i, layer in enumerate(self.model.layers):
            if has_experts(hf_config, i):
                layer.mlp = SparseMLP(hf_config, ops)  # on the meta device: the MLP had no memory
