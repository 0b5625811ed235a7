"""Qwen2, Qwen2.5 and Qwen3 (dense): a decoder whose tokens all lie in one flat dimension T.

The two families differ in two places: Qwen2 has a bias on q, k and v; Qwen3 normalises every head of q and k.
"""

import torch
from torch import nn

from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.attention import Batch, paged_attention, store_kv
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.rotary import rope_table, rotate

MODEL_TYPES = ("qwen2", "qwen3")


def check_supported(config) -> None:
    """Raises ValueError for a Hugging Face config that this file does not implement."""
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"model_type={config.model_type!r} is not supported: supported are {', '.join(MODEL_TYPES)}")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r} is not supported: supported is silu")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("use_sliding_window=True is not supported: every layer attends to its whole context")


def head_dim_of(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class Attention(nn.Module):
    def __init__(self, config, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim_of(config)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = self.head_dim**-0.5
        is_qwen3 = config.model_type == "qwen3"
        bias = config.attention_bias if is_qwen3 else True
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias and is_qwen3)
        if is_qwen3:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: Batch) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(self.q_norm(q), cos_sin), rotate(self.k_norm(k), cos_sin)
        store_kv(k, v, batch, self.layer)
        return self.o_proj(paged_attention(q, batch, self.layer, self.scale).flatten(1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size})
        self.down_proj = Linear(size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor, batch: Batch) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen(nn.Module):
    """Parameters have the checkpoint's names, so that loading is a table and not a program."""

    def __init__(self, config, max_model_len: int):
        super().__init__()
        check_supported(config)
        self.rope = rope_table(config, head_dim_of(config), max_model_len)
        self.model = Decoder(config)
        self.lm_head = None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden states [T, hidden_size]."""
        x, cos_sin = self.model.embed_tokens(input_ids), self.rope[positions]
        for layer in self.model.layers:
            x = layer(x, cos_sin, batch)
        return self.model.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, hidden_size] -> [B, vocab_size] fp32, only for the tokens that are sampled."""
        return (self.lm_head or self.model.embed_tokens).logits(hidden)
