"""Qwen3.5 (text): three of four layers are Gated DeltaNet, the others attention as in Qwen3.

Beside the layers, five things differ from Qwen3. Norms multiply by 1 + weight. A half of q_proj is
a gate for what attention gives. Only a part of each head is rotated. The fields lie in
`text_config`. The tensors have another prefix (checkpoint.py). In Qwen3.5-MoE, each layer has
experts, and one more MLP for all tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary import rope_settings, rope_table
from nanovllm.models.dense import MLP, Attention, DenseModel, check_supported, head_dim_of
from nanovllm.models.experts import OneByOne, SparseMLP, check_experts
from nanovllm.topics.hybrid.delta import GatedDeltaNet, StateBatch, state_shapes

KINDS = ["full_attention", "linear_attention"]  # of layers


def text_config(hf_config) -> Any:
    """The config of the language model, from that of the whole checkpoint. Raises ValueError if it
    is not supported."""
    text = getattr(hf_config, "text_config", hf_config)
    for name in ("tie_word_embeddings", "quantization_config", "dtype"):
        value = getattr(hf_config, name, None)
        if value:  # else the inner one holds: False may be a default of transformers
            setattr(text, name, value)
    if "moe" in text.model_type:
        text.norm_topk_prob = True
        text.decoder_sparse_step = 1
        text.intermediate_size = text.shared_expert_intermediate_size
        check_experts(text)
    check_supported(text)
    kinds = sorted(set(text.layer_types))
    if kinds != KINDS:
        both = " and ".join(KINDS)
        raise ValueError(f"layer_types={kinds} must be {both}, both")
    value_heads = text.linear_num_value_heads
    key_heads = text.linear_num_key_heads
    if value_heads % key_heads:
        heads = f"{value_heads} value heads"
        raise ValueError(f"linear_num_key_heads={key_heads} does not divide {heads}")
    size = rotary_size(text)
    whole = head_dim_of(text)
    if size % 2 or whole % 2:
        raise ValueError(
            f"{size} of {whole} numbers of a head cannot be rotated: both must be even"
        )
    return text


# --- rotation of a part of a head ---


def rotary_size(hf_config) -> int:
    """How many numbers of a head are rotated."""
    settings = rope_settings(hf_config)
    return int(head_dim_of(hf_config) * settings.get("partial_rotary_factor", 1.0))


def order_of(hf_config) -> Tensor:
    """The order of a head's numbers in which all kernels can rotate it. They rotate each number of
    the first half with one of the second, so each half begins with half of what is rotated."""
    middle = rotary_size(hf_config) // 2
    size = head_dim_of(hf_config)
    numbers = torch.arange(size, device="cpu")
    sizes = [middle, middle, size - 2 * middle]
    first, second, rest = numbers.split(sizes)
    rest_1, rest_2 = rest.chunk(2)
    return torch.cat([first, rest_1, second, rest_2])


# --- layers ---


class GatedAttention(Attention):
    """Attention with a gate. `layer` counts only layers of this kind."""

    def __init__(self, hf_config, layer: int, ops: Ops, device: torch.device):
        super().__init__(hf_config, layer, ops)
        size = self.head_dim
        heads, kv_heads, _ = self.sizes
        parts = {
            "q_proj": 2 * heads * size,
            "k_proj": kv_heads * size,
            "v_proj": kv_heads * size,
        }
        self.qkv_proj = Linear(hf_config.hidden_size, parts, hf_config.attention_bias)
        # q_proj gives q and gate of the first head, then those of the second ...
        num_parts = 2 * (heads + kv_heads)
        with torch.device("cpu"):
            numbers = torch.arange(num_parts * size).view(num_parts, size)
        queries = numbers[: 2 * heads : 2]
        keys, values = numbers[2 * heads :].chunk(2)
        rotated = torch.cat([queries, keys])
        rotated = rotated[:, order_of(hf_config)]
        order = torch.cat([rotated, values])
        self.order = order.flatten().to(device)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        mixed = self.qkv_proj(x)
        ordered = mixed[:, self.order]
        qkv = ordered.view(len(x), -1, self.head_dim)
        gates = mixed.unflatten(1, (-1, self.head_dim))
        gate = gates[:, 1 : 2 * self.sizes[0] : 2].sigmoid()
        norms = (self.q_norm, self.k_norm)
        q = self.ops.rotate_and_store(qkv, norms, cos_sin, self.sizes, batch, self.layer)
        attended = self.ops.paged_attention(q, batch, self.layer, self.scale)
        gated = attended * gate
        return self.o_proj(gated.flatten(1))


class SharedMLP(SparseMLP):
    """Experts, and one that all tokens share, with a gate."""

    def __init__(self, hf_config, ops: Ops):
        super().__init__(hf_config, ops)
        self.shared_expert = MLP(hf_config, ops)
        self.shared_expert_gate = Linear(hf_config.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.shared_expert_gate(x).sigmoid()
        shared = self.shared_expert(x)
        return super().forward(x) + gate * shared


class HybridModel(DenseModel):
    """DenseModel, in which other layers replace attention."""

    checked = staticmethod(text_config)
    view = staticmethod(OneByOne)

    def __init__(self, hf_config, rope: Tensor, ops: Ops):
        super().__init__(hf_config, rope, ops)
        self.width = hf_config.linear_conv_kernel_dim - 1
        self.state_shapes = state_shapes(hf_config)
        self.num_kv_layers = 0
        for i, (layer, kind) in enumerate(zip(self.model.layers, hf_config.layer_types)):
            del layer.self_attn
            if kind == "full_attention":
                layer.self_attn = GatedAttention(hf_config, self.num_kv_layers, ops, rope.device)
                self.num_kv_layers += 1
            else:
                layer.linear_attn = GatedDeltaNet(hf_config, i - self.num_kv_layers, ops)
                # as the layer calls it, but without parameters of this name
                vars(layer)["self_attn"] = layer.linear_attn
            if "moe" in hf_config.model_type:
                layer.mlp = SharedMLP(hf_config, ops)

    def to(self, dtype: torch.dtype) -> "HybridModel":  # type: ignore[override]
        """Norms, convolutions and decays stay in fp32: they are few numbers, and 1 + weight would
        lose digits."""
        super().to(dtype)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm | nn.Conv1d | GatedDeltaNet):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.float()
        return self

    @staticmethod
    def rope_of(hf_config, max_model_len: int) -> Tensor:
        """The angles of all positions, for heads in the order of `order_of`. The numbers that are
        not rotated have the angle 0."""
        size = rotary_size(hf_config)
        angles = rope_table(hf_config, size, max_model_len)
        cos, sin = angles.chunk(2, -1)
        rest = (head_dim_of(hf_config) - size) // 2
        whole_cos = F.pad(cos, (0, rest), value=1.0)
        whole_sin = F.pad(sin, (0, rest))
        return torch.cat([whole_cos, whole_sin], -1)

    def cache_shape(self, block_size: int, dtype: torch.dtype, num_slots: int) -> CacheShape:
        shape = super().cache_shape(block_size, dtype, num_slots)
        num_layers = len(self.model.layers) - self.num_kv_layers
        states = tuple((num_layers, *one) for one in self.state_shapes)
        return shape._replace(states=states, num_slots=num_slots)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        with_states = StateBatch(**vars(batch), width=self.width)
        return super().forward(input_ids, positions, with_states)
