"""Decode steps recorded as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.batch import Batch
from nanovllm.schedule import Schedule
from nanovllm.step import StepInputs

SIZES = [1, 2, 4, 8, *range(16, 513, 16)]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, up to the first that holds `max_num_seqs`. Batches larger than 512 run eagerly."""
    return [size for size, smaller in zip(SIZES, [0, *SIZES]) if smaller < max_num_seqs]


def padding(size: int, max_context: int, kv_cache: Tensor) -> StepInputs:
    """A decode step of `size` padding rows: no slot to write to, no context to read, no block."""
    batch = Batch(
        kv_cache,
        slot_mapping=torch.full((size,), -1),
        cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
        context_lens=torch.zeros(size, dtype=torch.int32),
        cu_blocks=torch.zeros(size + 1, dtype=torch.int32),
        block_tables=torch.zeros(1, dtype=torch.int32),  # an empty tensor has no address to record
        num_decodes=size,
        max_context=max_context,
    )
    input_ids, positions = torch.zeros(2, size, dtype=torch.int64)
    return StepInputs(input_ids, positions, batch, sampled_rows=torch.zeros(0, dtype=torch.int64))


class DecodeGraphs:
    """A model, recorded for several batch sizes. All graphs read their inputs from one buffer.

    A graph replays the same kernels with the same arguments at the same addresses. So inputs are copied to the
    addresses that were recorded, and unused rows are padding. Block tables come last: they may have any length. Without
    CUDA, recording and replay are plain calls; everything else is the same.
    """

    def __init__(self, model: nn.Module, max_num_seqs: int, max_model_len: int, kv_cache: Tensor):
        self.model, self.max_model_len, self.kv_cache, self.device = (
            model,
            max_model_len,
            kv_cache,
            kv_cache.device,
        )
        self.sizes = graph_sizes(max_num_seqs)
        num_bytes = sum(
            t.nbytes + 16 for t in padding(self.sizes[-1], max_model_len, kv_cache).model_inputs
        )
        num_bytes += 4 * self.sizes[-1] * -(-max_model_len // kv_cache.shape[3])  # block tables
        num_bytes += 128 + 64 * self.sizes[-1]  # the sampling parameters follow the graph's inputs
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self.replays: dict[int, Callable[[], Tensor]] = {}
        self.pool: Any = None

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record the largest size first; the smaller ones then reuse its memory."""
        step = padding(size, self.max_model_len, self.kv_cache).to(self.device, self.buffer)
        call = partial(self.model, step.input_ids, step.positions, step.batch)
        self.replays[size] = call if self.device.type == "cpu" else self._captured(call)

    def _captured(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        call()  # compiles what is not compiled yet, which is impossible during a recording
        graph = torch.cuda.CUDAGraph()
        # a stream of its own: PyTorch's for recordings belongs to whichever device recorded first
        with torch.cuda.graph(graph, pool=self.pool, stream=torch.cuda.Stream(self.device)):
            hidden = call()
        self.pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay

    def size_for(self, schedule: Schedule) -> int | None:
        """Rows of the smallest graph that can compute the step; None if it is not a pure decode or is too large."""
        rows = len(schedule.items)
        return (
            next((size for size in self.sizes if size >= rows), None)
            if schedule.num_tokens == rows
            else None
        )

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step as it was computed: padded, on the device."""
        step = self.padded(step, size).to(self.device, self.buffer)
        return self.replays[size](), step

    def padded(self, step: StepInputs, size: int) -> StepInputs:
        """A step, padded to the shapes of a recording. What is not part of a recording is left unchanged."""
        rows = padding(size, self.max_model_len, self.kv_cache)
        for whole, values in zip(rows.model_inputs[:-1], step.model_inputs):
            whole[: len(values)] = values
        rows.batch.block_tables = step.batch.block_tables
        return replace(rows, sampled_rows=step.sampled_rows, sampling=step.sampling)
