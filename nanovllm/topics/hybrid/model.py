"""Qwen3.5 (text): three of four layers are Gated DeltaNet, the others attention as in Qwen3.

Beside the layers, five things differ from Qwen3. Norms multiply by 1 + weight. A half of q_proj is a
gate for what attention gives. Only a part of each head is rotated. The fields lie in `text_config`.
The tensors have another prefix (checkpoint.py).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary import rope_settings, rope_table
from nanovllm.models.dense import MLP, head_dim_of
from nanovllm.topics.hybrid.delta import GatedDeltaNet, Rows

KINDS = ("linear_attention", "full_attention")  # of layers


def text_config(config) -> Any:
    """The config of the language model, from that of the whole checkpoint. Raises ValueError if it
    is not supported."""
    text = getattr(config, "text_config", config)
    if text is not config:
        text.tie_word_embeddings = config.tie_word_embeddings
        for name in ("quantization_config", "dtype"):
            if getattr(config, name, None) is not None:
                setattr(text, name, getattr(config, name))
    if text.hidden_act != "silu":
        raise ValueError(f"hidden_act={text.hidden_act!r} is not supported, only silu")
    kinds = [kind for kind in KINDS if kind in text.layer_types]
    if set(text.layer_types) - {*KINDS} or len(kinds) < 2:
        both = " and ".join(KINDS)
        raise ValueError(f"layer_types={sorted(set(text.layer_types))} must be {both}, both")
    if text.linear_num_value_heads % text.linear_num_key_heads:
        heads = f"linear_num_key_heads={text.linear_num_key_heads}"
        raise ValueError(f"{heads} does not divide {text.linear_num_value_heads} value heads")
    return text


# --- rotation of a part of a head ---


def rotary_size(config) -> int:
    """How many numbers of a head are rotated."""
    settings = rope_settings(config)
    return int(head_dim_of(config) * settings.get("partial_rotary_factor", 1.0))


def order_of(config) -> Tensor:
    """The order of a head's numbers in which all kernels can rotate it. They rotate each number of
    the first half with one of the second, so each half begins with half of what is rotated."""
    middle = rotary_size(config) // 2
    size = head_dim_of(config)
    numbers = torch.arange(size, device="cpu")
    first, second, rest = numbers.split([middle, middle, size - 2 * middle])
    half = size // 2 - middle
    return torch.cat([first, rest[:half], second, rest[half:]])


def rope_of(config, max_model_len: int) -> Tensor:
    """The angles in this order, see rope_table. The numbers that are not rotated have the angle
    0."""
    size = rotary_size(config)
    cos, sin = rope_table(config, size, max_model_len).chunk(2, -1)
    rest = (head_dim_of(config) - size) // 2
    return torch.cat([F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))], -1)


# --- layers ---


class GatedAttention(nn.Module):
    """Attention as in dense.py, with a gate. `layer` counts only layers of this kind."""

    def __init__(self, config, layer: int, ops: Ops, device: torch.device):
        super().__init__()
        self.layer = layer
        self.ops = ops
        self.head_dim = size = head_dim_of(config)
        self.scale = size**-0.5
        self.heads = heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        self.sizes = [heads, kv_heads, kv_heads]
        parts = {
            "q_proj": 2 * heads * size,
            "k_proj": kv_heads * size,
            "v_proj": kv_heads * size,
        }
        self.q_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.qkv_proj = Linear(config.hidden_size, parts, config.attention_bias)
        self.o_proj = Linear(heads * size, config.hidden_size, config.attention_bias)
        # q_proj gives q and gate of the first head, then those of the second ...
        first = [2 * i for i in range(heads)] + [2 * heads + i for i in range(2 * kv_heads)]
        begins = size * torch.tensor(first, device="cpu").unsqueeze(1)
        order = order_of(config).repeat(heads + 2 * kv_heads, 1)
        order[heads + kv_heads :] = torch.arange(size, device="cpu")  # v is not rotated
        self.order = (begins + order).flatten().to(device)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        mixed = self.qkv_proj(x)
        qkv = mixed[:, self.order].view(len(x), -1, self.head_dim)
        gate = mixed.unflatten(1, (-1, self.head_dim))[:, 1 : 2 * self.heads : 2]
        norms = (self.q_norm, self.k_norm)
        q = self.ops.rotate_and_store(qkv, norms, cos_sin, self.sizes, batch, self.layer)
        attended = self.ops.paged_attention(q, batch, self.layer, self.scale)
        return self.o_proj((attended * gate.sigmoid()).flatten(1))


class DecoderLayer(nn.Module):
    def __init__(self, config, kind: str, layer: int, ops: Ops, device: torch.device):
        super().__init__()
        self.ops = ops
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, ops)
        else:
            self.self_attn = GatedAttention(config, layer, ops, device)
        self.mlp = MLP(config, ops)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, residual: Tensor, x: Tensor, cos_sin: Tensor, batch: Batch, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """See dense.DecoderLayer."""
        residual, x = self.ops.add_and_norm(residual, x, self.input_layernorm)
        if hasattr(self, "linear_attn"):
            x = self.linear_attn(x, rows)
        else:
            x = self.self_attn(x, cos_sin, batch)
        residual, x = self.ops.add_and_norm(residual, x, self.post_attention_layernorm)
        return residual, self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, config, ops: Ops, device: torch.device):
        super().__init__()
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        self.layers = nn.ModuleList()
        for i, kind in enumerate(config.layer_types):
            layer = config.layer_types[:i].count("full_attention")
            self.layers.append(DecoderLayer(config, kind, layer, ops, device))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class HybridModel(nn.Module):
    """What DenseModel is for the dense families. `states` is a StateCache, which sets itself."""

    states: Any = None

    def __init__(self, config, rope: Tensor, ops: Ops):
        super().__init__()
        self.ops = ops
        self.num_kv_heads = config.num_key_value_heads
        self.num_kv_layers = config.layer_types.count("full_attention")
        self.width = config.linear_conv_kernel_dim - 1
        self.rope = rope
        self.model = Decoder(config, ops, rope.device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def to(self, dtype: torch.dtype) -> "HybridModel":
        """Norms, convolutions and decays stay in fp32: they are few numbers, and 1 + weight would
        lose digits."""
        super().to(dtype)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm | nn.Conv1d | GatedDeltaNet):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.float()
        return self

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden states [T, hidden_size]."""
        residual = self.model.embed_tokens(input_ids)
        x = torch.zeros_like(residual)
        cos_sin = self.rope[positions]
        rows = Rows(batch, self.width)
        for layer in self.model.layers:
            residual, x = layer(residual, x, cos_sin, batch, rows)
        _, x = self.ops.add_and_norm(residual, x, self.model.norm)
        return x
