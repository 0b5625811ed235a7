"""Heads: whether ranks can share the heads of a model. Imports no torch."""

from nanovllm.options import refusal


def check_heads(num_ranks: int, heads: int, kv_heads: int) -> None:
    """Raises ValueError if the heads cannot be divided among the ranks. Several ranks may have
    the same KV head."""
    if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        problem = f"{heads} query heads and {kv_heads} KV heads cannot be divided by it"
        raise refusal("tensor_parallel_size", num_ranks, problem)
