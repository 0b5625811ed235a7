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
    limit, and the next one. Larger steps run eagerly, and so do most with chunks of prompts."""
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
        self.with_drafts = 1 + limits.num_drafts  # tokens of a sequence, on average at most
        max_blocks_per_seq = -(-limits.max_model_len // kv_cache.block_size)
        self.max_table_blocks = self.sizes[-1] * max_blocks_per_seq
        self.buffer = torch.zeros(self._max_bytes(), dtype=torch.uint8, device=self.device)
        self.replays: dict[int, Callable[[], Tensor]] = {}  # of decodes, by their number
        self.replays_of_drafts: dict[int, Callable[[], Tensor]] = {}
        self.pool: Any = None  # of memory, which all recordings share
        self.stream: torch.cuda.Stream | None = None
        if self.device.type != "cpu":
            # one for all recordings: memory and cuBLAS' workspaces are reused within a stream
            self.stream = torch.cuda.Stream(self.device)

    def _max_bytes(self) -> int:
        """What the inputs of any recorded step take: the most rows and blocks, all of Sampling."""
        step = self.padding(self.sizes[-1], self.with_drafts)
        step.batch.block_tables = torch.zeros(self.max_table_blocks, dtype=torch.int32)
        num_rows = self.limits.max_num_seqs * self.with_drafts
        largest = torch.zeros(num_rows, dtype=torch.int64)
        step.sampling = Sampling(largest, largest, largest, largest, largest, largest)
        # a row for each sequence that draws, and for each whose prompt is scored
        step.sampled_rows = torch.zeros(2 * num_rows, dtype=torch.int64)
        return buffer_slices(step.tensors)[-1].stop

    def padding(self, size: int, tokens: int = 1) -> StepInputs:
        """A step in which nothing is computed: no slot to write to, no context to read. `tokens`
        are those of a sequence on average."""
        num_tokens = size * tokens
        no_block = torch.zeros(1, dtype=torch.int32)  # an empty tensor has no address to record
        batch = Batch(
            self.kv_cache,
            slot_mapping=torch.full((num_tokens,), -1),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32),
            context_lens=torch.zeros(size, dtype=torch.int32),
            cu_blocks=torch.zeros(size + 1, dtype=torch.int32),
            state_slots=torch.zeros(size, dtype=torch.int64) if self.kv_cache.states else None,
            block_tables=no_block,
            num_decodes=size if tokens == 1 else 0,
        )
        return StepInputs(
            input_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            batch=batch,
            sampled_rows=torch.zeros(0, dtype=torch.int64),
        )

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record the largest size first; the smaller ones then reuse its memory."""
        if self.with_drafts > 1:
            self.replays_of_drafts[size] = self._recorded(size, self.with_drafts)
        self.replays[size] = self._recorded(size, 1)

    def _recorded(self, size: int, tokens: int) -> Callable[[], Tensor]:
        step = self.padding(size, tokens).to(self.device, self.buffer)
        call: Callable[[], Tensor] = partial(hidden_states, self.model, step)
        return call if self.device.type == "cpu" else self._captured(call)

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
        num_seqs = len(batch.context_lens)
        has_chunks = batch.num_decodes < num_seqs
        # some block managers reserve more than a sequence can fill
        if len(batch.block_tables) > self.max_table_blocks:
            return None
        if has_chunks:
            if self.with_drafts == 1:
                return None
            num_seqs = max(num_seqs, -(-len(step.input_ids) // self.with_drafts))
        return next((size for size in self.sizes if size >= num_seqs), None)

    def run(self, step: StepInputs, size: int) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step as it was computed: padded, on the device."""
        step = self.padded(step, size)
        step = step.to(self.device, self.buffer)
        step.fill_in_pending()
        replays = self.replays if step.batch.num_decodes else self.replays_of_drafts
        return replays[size](), step

    def padded(self, step: StepInputs, size: int) -> StepInputs:
        """The step in the shapes of a recording. The sampling of its rows is not recorded."""
        batch = step.batch
        num_seqs = len(batch.context_lens)
        has_chunks = batch.num_decodes < num_seqs
        rows = self.padding(size, self.with_drafts if has_chunks else 1)
        inputs = step.model_inputs
        for name, whole in rows.model_inputs.items():
            if name != "block_tables":
                whole[: len(inputs[name])] = inputs[name]
        if has_chunks:  # a sequence of padding has no token
            rows.batch.cu_seqlens_q[num_seqs:] = len(step.input_ids)
        rows.batch.block_tables = batch.block_tables
        rows.last_token_ids = step.last_token_ids
        return replace(rows, sampled_rows=step.sampled_rows, sampling=step.sampling)
