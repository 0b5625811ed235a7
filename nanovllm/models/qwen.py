"""Qwen2, Qwen2.5 and Qwen3 (dense): a decoder in which all tokens lie along one flat dimension T.

The two families differ in two places: Qwen2 has biases on q, k and v; Qwen3 normalizes each head of q and k.
"""

import torch
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.layers.linear import Linear
from nanovllm.layers.ops import Ops
from nanovllm.layers.rotary import rope_table

MODEL_TYPES = ("qwen2", "qwen3")


def check_supported(config) -> None:
    """Raises ValueError for a Hugging Face config that is not supported here."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type={config.model_type!r} is not supported, only {', '.join(MODEL_TYPES)}"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} is not supported, only silu")
    if getattr(config, "use_sliding_window", False):
        raise ValueError(
            "use_sliding_window=True is not supported: here every layer attends to its whole context"
        )


def head_dim_of(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Attention(nn.Module):
    def __init__(self, config, layer: int, ops: Ops):
        super().__init__()
        self.layer, self.ops = layer, ops
        self.head_dim = head_dim_of(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.sizes = [heads, kv_heads, kv_heads]  # of q, k and v
        self.scale = self.head_dim**-0.5
        is_qwen3 = config.model_type == "qwen3"
        bias = config.attention_bias if is_qwen3 else True
        q_size, kv_size = heads * self.head_dim, kv_heads * self.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias and is_qwen3)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if is_qwen3 else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if is_qwen3 else None

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = self.ops.norm_and_rotate(qkv, self.q_norm, self.k_norm, cos_sin, self.sizes)
        self.ops.store_kv(k, v, batch, self.layer)
        return self.o_proj(self.ops.paged_attention(q, batch, self.layer, self.scale).flatten(1))


class MLP(nn.Module):
    def __init__(self, config, ops: Ops):
        super().__init__()
        self.ops, size = ops, config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size})
        self.down_proj = Linear(size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config, layer: int, ops: Ops):
        super().__init__()
        self.ops = ops
        self.self_attn = Attention(config, layer, ops)
        self.mlp = MLP(config, ops)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """`residual` is the sum of all layer outputs so far except the latest, which is x. It is updated in place."""
        x = self.self_attn(self.ops.add_and_norm(x, residual, self.input_layernorm), cos_sin, batch)
        return self.mlp(self.ops.add_and_norm(x, residual, self.post_attention_layernorm))


class Decoder(nn.Module):
    def __init__(self, config, ops: Ops):
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, ops) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen(nn.Module):
    """Parameters have the same names as in the checkpoint, so that loading needs only a table."""

    def __init__(self, config, max_model_len: int, ops: Ops):
        super().__init__()
        check_supported(config)
        self.ops = ops
        self.rope = rope_table(config, head_dim_of(config), max_model_len)
        self.model = Decoder(config, ops)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden states [T, hidden_size]."""
        x, cos_sin = self.model.embed_tokens(input_ids), self.rope[positions]
        residual = torch.zeros_like(x)
        for layer in self.model.layers:
            x = layer(x, residual, cos_sin, batch)
        return self.ops.add_and_norm(x, residual, self.model.norm)
