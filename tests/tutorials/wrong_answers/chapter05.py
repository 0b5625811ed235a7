"""Answers to the exercises of chapter 05 that must not pass: exercise, code, a part of what is said."""

PARAMETERS = """
def parameters(config):
    hidden = config["hidden_size"]
    dim = {dim}
    heads = config["num_attention_heads"] * dim
    kv_heads = {kv_heads} * dim
    attention = hidden * (2 * heads + 2 * kv_heads) + 2 * dim
    mlp = 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"] * (attention + mlp + 2 * hidden)
    tables = {tables}
    return tables * config["vocab_size"] * hidden + layers + {last_norm}
"""
RIGHT = dict(
    dim='config["head_dim"]',
    kv_heads='config["num_key_value_heads"]',
    tables='1 if config["tie_word_embeddings"] else 2',
    last_norm="hidden",
)
LAST_ROWS = """
class LastRows(Qwen3):
    def logits(self, ids, positions, attend, rows):
        x = self.weights["embed_tokens.weight"][ids]
        for layer in self.layers:
            name = f"layers.{{layer}}."
            {before}
            h = self.norm(name + "input_layernorm", x)
            q = self.linear(name + "self_attn.q_proj", h).unflatten(-1, (self.heads, self.dim))
            k = self.linear(name + "self_attn.k_proj", h).unflatten(-1, (self.kv_heads, self.dim))
            v = self.linear(name + "self_attn.v_proj", h).unflatten(-1, (self.kv_heads, self.dim))
            q = rotate(self.norm(name + "self_attn.q_norm", q), positions)
            k = rotate(self.norm(name + "self_attn.k_norm", k), positions)
            attended = attend(layer, q, k, v)
            {after}
            x = x + self.linear(name + "self_attn.o_proj", attended.flatten(-2))
            {late}
            h = self.norm(name + "post_attention_layernorm", x)
            gate = F.silu(self.linear(name + "mlp.gate_proj", h))
            x = x + self.linear(name + "mlp.down_proj", gate * self.linear(name + "mlp.up_proj", h))
        return self.norm("norm", x) @ self.weights["embed_tokens.weight"].T
"""
NOTHING = dict(before="", after="", late="")
IN_THE_LAST = "if layer == self.layers[-1]: "

WRONG = {
    "head_dim is always hidden / heads": (
        "05.1",
        PARAMETERS.format(**RIGHT | {"dim": 'hidden // config["num_attention_heads"]'}),
        "Qwen3-0.6B has 596,049,920 parameters, you say 507965952",
    ),
    "keys and values for each head": (
        "05.1",
        PARAMETERS.format(**RIGHT | {"kv_heads": 'config["num_attention_heads"]'}),
        "the embedded model has 2,263,424 parameters, you say",
    ),
    "no norm at the end": (
        "05.1",
        PARAMETERS.format(**RIGHT | {"last_norm": "0"}),
        "the embedded model has 2,263,424 parameters, you say 2263232",
    ),
    "every head is tied": (
        "05.1",
        PARAMETERS.format(**RIGHT | {"tables": "1"}),
        "Qwen3-8B has",
    ),
    "no bias": (
        "05.2",
        """
class Qwen2(Qwen3):
    def linear(self, name, x):
        return x @ self.weights[name + ".weight"].T

    def norm(self, name, x):
        return x if name.endswith(("q_norm", "k_norm")) else super().norm(name, x)
""",
        "a Qwen2 with biases: your logits and transformers' differ by",
    ),
    "heads are normalized, without a weight": (
        "05.2",
        """
class Qwen2(Qwen3):
    def linear(self, name, x):
        return super().linear(name, x) + self.weights.get(name + ".bias", 0)

    def norm(self, name, x):
        return F.rms_norm(x, x.shape[-1:], self.weights.get(name + ".weight"), eps=1e-6)
""",
        "a Qwen2 whose biases are 0: your logits and transformers' differ by",
    ),
    "only q has a bias": (
        "05.2",
        """
class Qwen2(Qwen3):
    def linear(self, name, x):
        y = super().linear(name, x)
        return y + self.weights[name + ".bias"] if name.endswith("q_proj") else y

    def norm(self, name, x):
        return x if name.endswith(("q_norm", "k_norm")) else super().norm(name, x)
""",
        "a Qwen2 with biases: your logits and transformers' differ by",
    ),
    "all rows, and some are taken at the end": (
        "05.3",
        """
class LastRows(Qwen3):
    def logits(self, ids, positions, attend, rows):
        return super().logits(ids, positions, attend)[rows]
""",
        r"layers.4.self_attn.o_proj computes 8 rows, 2 are enough",
    ),
    "the last layer has no other rows at all": (
        "05.3",
        LAST_ROWS.format(
            **NOTHING | {"before": IN_THE_LAST + "x, positions = x[rows], positions[rows]"}
        ),
        "attend of layer 4 gets 2 queries and 2 keys, not 8",
    ),
    "rows are left out after o_proj": (
        "05.3",
        LAST_ROWS.format(**NOTHING | {"late": IN_THE_LAST + "x = x[rows]"}),
        "layers.4.self_attn.o_proj computes 8 rows, 2 are enough",
    ),
    "rows are zero in every layer": (
        "05.3",
        LAST_ROWS.format(
            **NOTHING | {"late": "x = torch.zeros_like(x).index_copy(0, rows, x[rows])"}
        ).replace("return self.norm", "x = x[rows]\n        return self.norm"),
        "the logits are wrong by up to",
    ),
    "the rows of the residual stream are forgotten": (
        "05.3",
        LAST_ROWS.format(
            **NOTHING | {"after": IN_THE_LAST + "attended, x = attended[rows], x[: len(rows)]"}
        ),
        "the logits are wrong by up to",
    ),
}
