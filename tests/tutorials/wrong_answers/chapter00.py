"""Answers to the exercises of chapter 00 that must not pass: exercise, code, a part of what is said."""

WRONG = {
    "the last token is computed, too": (
        "00.1",
        """
def tokens_computed(prompts, answers):
    again = sum(p + i for p, a in zip(prompts, answers) for i in range(a))
    return again, sum(prompts) + sum(answers)
""",
        r"compute \(429, 112\) tokens, you say \(429, 116\)",
    ),
    "the constants of the example": (
        "00.1",
        "def tokens_computed(prompts, answers): return 429, 112",
        r"compute \(7, 7\) tokens, you say",
    ),
    "heads in place of KV heads": (
        "00.2",
        """
def kv_bytes(config, size):
    return 2 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * size
""",
        "Qwen3-0.6B: 114,688 bytes per token at 2 bytes per number, you say 229376",
    ),
    "head_dim is always hidden / heads": (
        "00.2",
        """
def kv_bytes(config, size):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    return 2 * config["num_hidden_layers"] * kv_heads * (config["hidden_size"] // heads) * size
""",
        "Qwen3-0.6B: 114,688 bytes .*, you say 57344",
    ),
    "it ignores the bytes per number": (
        "00.2",
        """
def kv_bytes(config, size):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 4 * config["num_hidden_layers"] * kv_heads * head_dim
""",
        "229,376 bytes per token at 4 bytes per number, you say 114688",
    ),
    "all seats are always full": (
        "00.3",
        "def num_steps(answers, seats): return -(-sum(answers) // seats)",
        r"\[9, 1, 1, 1\] tokens, 2 seats|\[6, 4, 3, 5\] tokens, 2 seats",
    ),
    "a batch ends together": (
        "00.3",
        """
def num_steps(answers, seats):
    return sum(max(answers[i : i + seats]) for i in range(0, len(answers), seats))
""",
        "steps, you say",
    ),
}
