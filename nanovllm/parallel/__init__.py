"""Tensor parallelism: each rank holds a shard of each layer, and all compute every step together."""
