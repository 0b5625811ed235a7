"""Qwen2, Qwen3, Llama and Mistral (dense): a decoder in which all tokens lie along one flat
dimension T.

The families differ in three places: Qwen2 has biases on q, k and v; Qwen3 normalizes each head of q
and k; Qwen3 and Llama may have biases on all products of attention.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary import rope_table


def check_supported(hf_config) -> Any:
    """Returns a Hugging Face config. Raises ValueError if it has parts that are not implemented
    here, with all their names."""
    gate = getattr(hf_config, "output_gate_type", None)
    refused = {
        "hidden_act": hf_config.hidden_act != "silu",
        "mlp_bias": getattr(hf_config, "mlp_bias", False),
        "output_gate_type": gate not in (None, "swish", "silu"),
    }
    found = [f"{name}={getattr(hf_config, name)!r}" for name, is_bad in refused.items() if is_bad]
    if found:
        here = "here the activation is silu, as are gates, and an MLP has no biases"
        raise ValueError(f"{', '.join(found)} is not supported: {here}")
    return hf_config


def head_dim_of(hf_config) -> int:
    return (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )


class Attention(nn.Module):
    def __init__(self, hf_config, layer: int, ops: Ops):
        super().__init__()
        self.layer = layer
        self.ops = ops
        self.head_dim = head_dim_of(hf_config)
        self.scale = self.head_dim**-0.5
        heads = hf_config.num_attention_heads
        kv_heads = hf_config.num_key_value_heads
        self.sizes = [heads, kv_heads, kv_heads]  # of q, k and v
        parts = {
            "q_proj": heads * self.head_dim,
            "k_proj": kv_heads * self.head_dim,
            "v_proj": kv_heads * self.head_dim,
        }
        qkv_bias = o_bias = getattr(hf_config, "attention_bias", False)
        if hf_config.model_type == "qwen2":
            qkv_bias, o_bias = True, False
        self.q_norm = None
        self.k_norm = None
        if hf_config.model_type.startswith("qwen3"):
            self.q_norm = nn.RMSNorm(self.head_dim, hf_config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, hf_config.rms_norm_eps)
        self.qkv_proj = Linear(hf_config.hidden_size, parts, qkv_bias)
        self.o_proj = Linear(parts["q_proj"], hf_config.hidden_size, o_bias)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        norms = (self.q_norm, self.k_norm)
        q = self.ops.rotate_and_store(qkv, norms, cos_sin, self.sizes, batch, self.layer)
        attended = self.ops.paged_attention(q, batch, self.layer, self.scale)
        return self.o_proj(attended.flatten(1))


class MLP(nn.Module):
    def __init__(self, hf_config, ops: Ops):
        super().__init__()
        self.ops = ops
        size = hf_config.intermediate_size
        self.gate_up_proj = Linear(hf_config.hidden_size, {"gate_proj": size, "up_proj": size})
        self.down_proj = Linear(size, hf_config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        x = self.ops.silu_and_mul(gate_up)
        return self.down_proj(x)


class DecoderLayer(nn.Module):
    def __init__(self, hf_config, layer: int, ops: Ops):
        super().__init__()
        self.ops = ops
        self.self_attn = Attention(hf_config, layer, ops)
        self.mlp = MLP(hf_config, ops)
        self.input_layernorm = nn.RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)

    def forward(
        self, residual: Tensor, x: Tensor, cos_sin: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """residual += attention(norm(residual)), then residual += mlp(norm(residual)).

        Each sum is computed together with the norm that follows it. So `x`, what the layer before
        adds, comes in beside the residual, and what this layer adds goes out beside it.
        """
        residual, x = self.ops.add_and_norm(residual, x, self.input_layernorm)
        x = self.self_attn(x, cos_sin, batch)
        residual, x = self.ops.add_and_norm(residual, x, self.post_attention_layernorm)
        return residual, self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, hf_config, ops: Ops):
        super().__init__()
        table = torch.empty(hf_config.vocab_size, hf_config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        layers = [DecoderLayer(hf_config, i, ops) for i in range(hf_config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)


class DenseModel(nn.Module):
    """Parameters have the same names as in the checkpoint, so that loading needs only a table.

    rope: the angles of all positions, see rope_table.
    """

    checked = staticmethod(check_supported)

    def __init__(self, hf_config, rope: Tensor, ops: Ops):
        super().__init__()
        self.ops = ops
        self.num_kv_layers = hf_config.num_hidden_layers
        self.kv_sizes = hf_config.num_key_value_heads, head_dim_of(hf_config)
        self.is_tied = hf_config.tie_word_embeddings  # the head has the embedding's weight
        self.rope = rope
        self.model = Decoder(hf_config, ops)
        self.lm_head = Linear(hf_config.hidden_size, hf_config.vocab_size)

    @staticmethod
    def rope_of(hf_config, max_model_len: int) -> Tensor:
        return rope_table(hf_config, head_dim_of(hf_config), max_model_len)

    @staticmethod
    def view(tensors: Any) -> Any:
        """The tensors of a file, by the names of this model."""
        return tensors

    def cache_shape(self, block_size: int, dtype: torch.dtype, num_slots: int) -> CacheShape:
        """What `num_slots` sequences keep, with keys and values in this dtype."""
        return CacheShape(self.num_kv_layers, block_size, *self.kv_sizes, dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden states [T, hidden_size]."""
        residual = self.model.embed_tokens(input_ids)
        x = torch.zeros_like(residual)
        cos_sin = self.rope[positions]
        for layer in self.model.layers:
            residual, x = layer(residual, x, cos_sin, batch)
        _, x = self.ops.add_and_norm(residual, x, self.model.norm)
        return x
