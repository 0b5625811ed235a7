"""HybridShard: what one rank has of a hybrid model. A state belongs to its head, so each rank has
the states of its heads."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.options import refusal
from nanovllm.topics.parallel.shards import Part, Shard


class HybridShard(Shard):
    def __init__(self, hf_config, rank: int, size: int):
        super().__init__(hf_config, rank, size)
        key_heads = hf_config.linear_num_key_heads
        value_heads = hf_config.linear_num_value_heads
        if key_heads % size:
            problem = f"{key_heads} key heads of linear attention cannot be divided by it"
            raise refusal("tensor_parallel_size", size, problem)
        self.config.linear_num_key_heads = key_heads // size
        self.config.linear_num_value_heads = value_heads // size
        keys = Part(key_heads * hf_config.linear_key_head_dim, rank, size)
        values = Part(value_heads * hf_config.linear_value_head_dim, rank, size)
        self.heads = Part(value_heads, rank, size)
        self.qkv = [keys, keys, values]
        queries = self.rows["q_proj"].length
        self.rows["q_proj"] = Part(2 * queries, rank, size)  # with the gate
        self.rows["in_proj_z"] = values
        self.rows["in_proj_b"] = self.heads
        self.rows["in_proj_a"] = self.heads
        self.columns["out_proj"] = values

    def read(self, tensors: Any, name: str) -> Tensor:
        *_, layer, kind = name.split(".")
        if kind in ("A_log", "dt_bias"):
            return self.cut(tensors, name, [self.heads])
        if layer in ("in_proj_qkv", "conv1d"):
            return self.cut(tensors, name, self.qkv)
        return super().read(tensors, name)

    def cut(self, tensors: Any, name: str, parts: list[Part]) -> Tensor:
        """This rank's rows of a tensor in which the rows of all parts follow each other."""
        whole = tensors.get_slice(name)
        length = sum(part.length for part in parts)
        Part(length, 0, 1).check(name, whole.get_shape()[0])
        rows = []
        begin = 0
        for part in parts:
            rows.append(whole[begin + part.begin : begin + part.end])
            begin += part.length
        return torch.cat(rows)
