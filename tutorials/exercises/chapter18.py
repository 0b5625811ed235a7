"""Your answers to the exercises of chapter 18. To check them: python -m tutorials.check 18"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


# --- 18.1 ---
class MLP(NamedTuple):
    """Computes down @ (silu(gate @ x) * (up @ x))."""

    gate: Tensor  # [middle, hidden]
    up: Tensor  # [middle, hidden]
    down: Tensor  # [hidden, middle]


def mlp_part(mlp: MLP, rank: int, num_ranks: int) -> MLP:
    """What one rank has. All ranks have matrices of the same shapes: the last ones may have zeros."""
    raise NotImplementedError


# --- 18.2 ---
class Attention(NamedTuple):
    """The weights, as in the files: [out, in]. A head has `head_dim` rows of q, or of k and v, and as
    many columns of o."""

    q: Tensor  # [heads * head_dim, hidden]
    k: Tensor  # [KV heads * head_dim, hidden]
    v: Tensor  # [KV heads * head_dim, hidden]
    q_bias: Tensor  # [heads * head_dim]
    o: Tensor  # [hidden, heads * head_dim]
    o_bias: Tensor  # [hidden]


def attention_part(attention: Attention, head_dim: int, rank: int, num_ranks: int) -> Attention:
    """What one rank has. Raises ValueError if the heads cannot be divided."""
    raise NotImplementedError


# --- 18.3 ---
def ring(
    rank: int,
    num_ranks: int,
    x: Tensor,
    send: Callable[[Tensor], None],
    receive: Callable[[], Tensor],
) -> Tensor:
    """The sum of all ranks' vectors. `x` itself stays as it is.

    `send` sends to rank + 1 (the last one sends to 0), `receive` waits for what rank - 1 has sent. A
    wire holds one message: `send` waits until the one before is taken.
    """
    raise NotImplementedError
