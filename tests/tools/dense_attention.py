"""Attention of one sequence at a time, as it is defined.

Tests import this file. An example that does: pytest tests/core/test_ops.py
"""

import torch


def dense_attention(q, k, v, scale):
    """q [Q, heads, d], the last Q of k and v [S, kv_heads, d]'s positions."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,shd->hqs", q, k) * scale
    ahead = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
    return torch.einsum("hqs,shd->qhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)
