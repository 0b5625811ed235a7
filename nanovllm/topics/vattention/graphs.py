"""Recorded steps of vAttention: a recording reads rows, whose pages may change between replays."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from nanovllm.backends.cuda_graphs import StepGraphs
from nanovllm.config import Limits
from nanovllm.step import StepInputs
from nanovllm.topics.vattention.cache import VirtualCache, in_rows


class RowGraphs(StepGraphs):
    """StepGraphs of a cache whose blocks are rows."""

    def __init__(self, model: Any, kv_cache: VirtualCache, limits: Limits):
        super().__init__(model, kv_cache.rows, limits)
        self.max_table_blocks = 2**62  # of a step: a recording gets one row for each sequence

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        seen = in_rows(step.batch)
        step = replace(step, batch=seen)
        return super().run(step, size)
