"""Heads: whether ranks can share the heads of a model. Imports no torch."""

from nanovllm.options import refusal


def check_heads(num_ranks: int, heads: int, kv_heads: int) -> None:
    """Raises ValueError if the heads cannot be divided among the ranks. Several ranks may have
    the same KV head."""
    kv_heads_divide = kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0
    if heads % num_ranks or not kv_heads_divide:
        problem = f"{heads} query heads and {kv_heads} KV heads cannot be divided by it"
        raise refusal("tensor_parallel_size", num_ranks, problem)
