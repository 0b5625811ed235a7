"""Qwen3 as one function: token ids in, logits out. How a token sees the tokens before it is left to `attend`."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class Qwen3:
    def __init__(self, path):
        path = Path(path)
        self.config = json.loads((path / "config.json").read_bytes())
        weights = load_file(path / "model.safetensors")
        self.weights = {name.removeprefix("model."): w.float() for name, w in weights.items()}
        self.layers = range(self.config["num_hidden_layers"])
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.dim = self.config["head_dim"]

    def logits(self, ids, positions, attend):
        """ids and positions [..., T] -> logits [..., T, vocab_size]."""
        x = self.weights["embed_tokens.weight"][ids]
        for layer in self.layers:
            name = f"layers.{layer}."
            h = self.norm(name + "input_layernorm", x)
            q = self.linear(name + "self_attn.q_proj", h).unflatten(-1, (self.heads, self.dim))
            k = self.linear(name + "self_attn.k_proj", h).unflatten(-1, (self.kv_heads, self.dim))
            v = self.linear(name + "self_attn.v_proj", h).unflatten(-1, (self.kv_heads, self.dim))
            q = rotate(self.norm(name + "self_attn.q_norm", q), positions)
            k = rotate(self.norm(name + "self_attn.k_norm", k), positions)
            x = x + self.linear(name + "self_attn.o_proj", attend(layer, q, k, v).flatten(-2))
            h = self.norm(name + "post_attention_layernorm", x)
            gate = F.silu(self.linear(name + "mlp.gate_proj", h))
            x = x + self.linear(name + "mlp.down_proj", gate * self.linear(name + "mlp.up_proj", h))
        return self.norm("norm", x) @ self.weights["embed_tokens.weight"].T

    def linear(self, name, x):
        return x @ self.weights[name + ".weight"].T

    def norm(self, name, x):
        return F.rms_norm(x, x.shape[-1:], self.weights[name + ".weight"], eps=1e-6)


def rotate(x, positions):
    """Turns each pair of numbers of a head by an angle that grows with the position."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** -(torch.arange(half) / half)
    angles = positions[..., None, None] * speeds
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention(q, k, v, mask=None):
    """q [..., T, heads, dim], k and v [..., keys, kv_heads, dim] -> as q. `mask` says what each query sees."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(-2, -3)
