"""Decodes recorded as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import Limits
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.sampler import Sampling
from nanovllm.models.dense import DenseModel
from nanovllm.step import StepInputs, buffer_slices

DECODES = [1, 2, 4, 8, *range(16, 513, 16)]


def graph_sizes(limits: Limits) -> list[int]:
    """The numbers of decodes for which a step is recorded, the smallest first: those below the
    limit, and the next one. Larger steps run eagerly, and so do steps with chunks of prompts."""
    return [size for size, smaller in zip(DECODES, [0, *DECODES]) if smaller < limits.max_num_seqs]


def hidden_states(model: DenseModel, step: StepInputs) -> Tensor:
    """What is recorded: a replay plans its own step, too."""
    step.batch.layout = model.ops.layout(step.batch)
    return model(step.input_ids, step.positions, step.batch)


class StepGraphs:
    """A model, recorded for several numbers of decodes. All graphs read their inputs from one
    buffer.

    A graph replays the same kernels with the same arguments at the same addresses. So inputs are
    copied to the addresses that were recorded, and unused rows are padding. Block tables come last:
    they may have any length. Without CUDA, recording and replay are plain calls; everything else is
    the same.
    """

    def __init__(
        self,
        model: DenseModel,
        kv_cache: KVCache,
        limits: Limits,
    ):
        self.model = model
        self.kv_cache = kv_cache
        self.limits = limits
        self.device = kv_cache.tensor.device
        self.sizes = graph_sizes(limits)
        max_blocks_per_seq = -(-limits.max_model_len // kv_cache.block_size)
        self.max_table_blocks = self.sizes[-1] * max_blocks_per_seq
        self.buffer = torch.zeros(self._max_bytes(), dtype=torch.uint8, device=self.device)
        self.replays: dict[int, Callable[[], Tensor]] = {}
        self.pool: Any = None  # of memory, which all recordings share
        self.stream: torch.cuda.Stream | None = None
        if self.device.type != "cpu":
            # one for all recordings: memory and cuBLAS' workspaces are reused within a stream
            self.stream = torch.cuda.Stream(self.device)

    def _max_bytes(self) -> int:
        """What the inputs of any recorded step take: the most rows and blocks, all of Sampling."""
        step = self.padding(self.sizes[-1])
        step.batch.block_tables = torch.zeros(self.max_table_blocks, dtype=torch.int32)
        largest = torch.zeros(self.limits.max_num_seqs, dtype=torch.int64)
        step.sampling = Sampling(largest, largest, largest, largest, largest, largest)
        # a row for each sequence that draws, and for each whose prompt is scored
        step.sampled_rows = torch.zeros(2 * self.limits.max_num_seqs, dtype=torch.int64)
        return buffer_slices(step.tensors)[-1].stop

    def padding(self, size: int) -> StepInputs:
        """A step in which nothing is computed: no slot to write to, no context to read."""
        no_block = torch.zeros(1, dtype=torch.int32)  # an empty tensor has no address to record
        batch = Batch(
            self.kv_cache,
            slot_mapping=torch.full((size,), -1),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
            context_lens=torch.zeros(size, dtype=torch.int32),
            cu_blocks=torch.zeros(size + 1, dtype=torch.int32),
            state_slots=torch.zeros(size, dtype=torch.int64) if self.kv_cache.states else None,
            block_tables=no_block,
            num_decodes=size,
        )
        return StepInputs(
            input_ids=torch.zeros(size, dtype=torch.int64),
            positions=torch.zeros(size, dtype=torch.int64),
            batch=batch,
            sampled_rows=torch.zeros(0, dtype=torch.int64),
        )

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record the largest size first; the smaller ones then reuse its memory."""
        step = self.padding(size).to(self.device, self.buffer)
        call: Callable[[], Tensor] = partial(hidden_states, self.model, step)
        if self.device.type != "cpu":
            call = self._captured(call)
        self.replays[size] = call

    def _captured(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        call()  # compiles what is not compiled yet, which is impossible during a recording
        graph = torch.cuda.CUDAGraph()
        # allocations of other threads must not make the recording fail
        recording = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        with recording:
            hidden = call()
        graph.replay()  # the first one also uploads it: not while a request waits
        self.pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay

    def size_for(self, step: StepInputs) -> int | None:
        """The smallest recording that can compute the step; None if no recording can."""
        batch = step.batch
        has_chunks = batch.num_decodes < len(batch.context_lens)
        # some block managers reserve more than a sequence can fill
        if has_chunks or len(batch.block_tables) > self.max_table_blocks:
            return None
        return next((size for size in self.sizes if size >= batch.num_decodes), None)

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step as it was computed: padded, on the device."""
        step = self.padded(step, size)
        step = step.to(self.device, self.buffer)
        step.fill_in_pending()
        return self.replays[size](), step

    def padded(self, step: StepInputs, size: int) -> StepInputs:
        """The step in the shapes of a recording. The sampling of its rows is not recorded."""
        rows = self.padding(size)
        num_decodes = step.batch.num_decodes
        inputs = step.model_inputs
        for name, whole in rows.model_inputs.items():
            if name != "block_tables":
                whole[:num_decodes] = inputs[name][:num_decodes]
        rows.batch.block_tables = step.batch.block_tables
        rows.last_token_ids = step.last_token_ids
        return replace(rows, sampled_rows=step.sampled_rows, sampling=step.sampling)
