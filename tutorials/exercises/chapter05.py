"""Your answers to the exercises of chapter 05. To check them: python -m tutorials.check 05"""

import torch
import torch.nn.functional as F

from tutorials.ladder.qwen3 import Qwen3, rotate


# --- 05.1 ---
def parameters(config: dict) -> int:
    """How many learned numbers a Qwen3 has, if this is its config.json. It has the keys vocab_size,
    hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
    head_dim and tie_word_embeddings."""
    raise NotImplementedError


# --- 05.2 ---
class Qwen2(Qwen3):
    """The function of the ladder for a Qwen2: q, k and v have a bias, and their heads no norm."""

    def linear(self, name, x):
        raise NotImplementedError

    def norm(self, name, x):
        raise NotImplementedError


# --- 05.3 ---
class LastRows(Qwen3):
    """Computes the logits of some rows only, and in the last layer no more than they need."""

    def logits(self, ids, positions, attend, rows):
        """ids and positions [T], rows [R], a tensor of row numbers -> logits [R, vocab_size]."""
        raise NotImplementedError
