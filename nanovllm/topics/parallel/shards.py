"""Shards: each rank's part of a model, as in Megatron-LM (Shoeybi et al., 2019, section 3). A rank
has its share of the heads, of the MLP's intermediate numbers, and of the vocabulary. A projection W
[out, in] to these is split by rows; a projection from them is split by columns. So each rank
computes a part of a sum, and one all-reduce adds the parts up."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.config import check_heads
from nanovllm.models.dense import DenseModel, head_dim_of
from nanovllm.topics.parallel.ranks import Group

SUMMED = ("o_proj", "out_proj", "mlp")  # modules of which each rank has a summand


class Part:
    """The rows of one rank, of `length` rows in all: the part with this index, of `count` equal
    parts."""

    def __init__(self, length: int, index: int, count: int):
        self.length = length
        self.size = -(-length // count)
        self.begin = min(index * self.size, length)
        self.end = min(self.begin + self.size, length)
        self.padding = self.size - (self.end - self.begin)

    def check(self, name: str, found: int) -> None:
        if found != self.length:
            problem = f"has a side of {found}, but config.json requires {self.length}"
            raise ValueError(f"{name} {problem}")

    def check_groups(self, name: str, size: int) -> None:
        remainders = (self.begin % size, self.end % size)
        if any(remainders):
            problem = f"groups of {size} numbers do not divide the {self.size} columns of a rank"
            raise ValueError(f"{name}: {problem}")


class Shard:
    """What one rank has of a model. If there are fewer KV heads than ranks, several ranks have the
    same one. The intermediate size and the vocabulary are rounded up: the last ranks have zeros
    there."""

    def __init__(self, hf_config, rank: int, size: int):
        self.rank = rank
        heads = hf_config.num_attention_heads
        kv_heads = hf_config.num_key_value_heads
        check_heads(size, heads, kv_heads)
        head_dim = head_dim_of(hf_config)
        kv_parts = min(size, kv_heads)
        mine = Part(heads * head_dim, rank, size)
        kv = Part(kv_heads * head_dim, rank * kv_parts // size, kv_parts)
        middle = Part(hf_config.intermediate_size, rank, size)
        words = Part(hf_config.vocab_size, rank, size)
        self.rows = {  # of W [out, in]
            "q_proj": mine,
            "k_proj": kv,
            "v_proj": kv,
            "gate_proj": middle,
            "up_proj": middle,
            "embed_tokens": words,
            "lm_head": words,
        }
        self.columns = {"o_proj": mine, "down_proj": middle}
        size_of_expert = getattr(hf_config, "moe_intermediate_size", 0)
        self.of_expert = Part(size_of_expert, rank, size)
        self.config = deepcopy(hf_config)  # of a model that is as large as the shard
        self.config.head_dim = head_dim
        self.config.num_attention_heads = heads // size
        self.config.num_key_value_heads = kv_heads // kv_parts
        self.config.intermediate_size = middle.size
        self.config.vocab_size = words.size
        self.config.moe_intermediate_size = self.of_expert.size

    def part_of(self, parts: dict[str, Part], name: str) -> Part:
        """The part of a tensor. Each expert is split as the MLP is."""
        if ".experts." in name:
            return self.of_expert
        return parts[name.split(".")[-2]]

    def read(self, tensors: Any, name: str) -> Tensor:
        """This rank's part of a tensor in a safetensors file. It reads nothing else."""
        *_, layer, kind = name.split(".")
        whole = tensors.get_slice(name)
        shape = [*whole.shape] if isinstance(whole, Tensor) else whole.get_shape()
        if layer in self.rows:
            part = self.part_of(self.rows, name)
            part.check(name, shape[0])
            rows = whole[part.begin : part.end]
            other_sides = [0, 0] * (len(shape) - 1)
            return F.pad(rows, [*other_sides, 0, part.padding])
        if layer in self.columns and kind != "bias":
            part = self.part_of(self.columns, name)
            # of a group, whose scale is a column: whole groups have no padding
            size = 1
            if kind != "weight":
                size = max(1, part.length // shape[-1])
            part.check(name, shape[-1] * size)
            part.check_groups(name, size)
            begin = part.begin // size
            end = part.end // size
            columns = whole[:, begin:end]
            return F.pad(columns, [0, part.padding])
        if layer in self.columns and self.rank > 0:
            return torch.zeros(shape)  # a bias is added once
        return tensors.get_tensor(name)

    def join(self, model: DenseModel, group: Group, vocab_size: int) -> None:
        """Adds the all-reduces, so that the layers' outputs become those of the whole model."""

        def add_up(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            return group.add_up(output)

        def gather(module: nn.Module, args: tuple, logits: Tensor) -> Tensor:
            parts = group.gather(logits)
            return torch.cat(parts, -1)[:, :vocab_size] if parts else logits

        model.model.embed_tokens = Embedding(model.model.embed_tokens.weight, group)  # type: ignore
        for name, module in model.named_modules():
            if name.endswith(SUMMED):
                module.register_forward_hook(add_up)
        model.lm_head.register_forward_hook(gather)


class Embedding(nn.Module):
    """This rank's rows of the embedding table. A token of another rank's rows has zeros."""

    def __init__(self, weight: nn.Parameter, group: Group):
        super().__init__()
        self.weight = weight
        self.group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = token_ids - self.group.rank * len(self.weight)
        is_mine = (rows >= 0) & (rows < len(self.weight))
        return self.group.add_up(F.embedding(rows * is_mine, self.weight) * is_mine[:, None])
