"""Token embedding."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]"""
        return F.embedding(token_ids, self.weight)
