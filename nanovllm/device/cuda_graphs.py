"""Steps recorded as CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.config import Limits
from nanovllm.layers.batch import Batch
from nanovllm.layers.kv_cache import KVCache
from nanovllm.layers.ops import Ops
from nanovllm.layers.sampler import Sampling
from nanovllm.step import StepInputs, buffer_slices

DECODES = [1, 2, 4, 8, *range(16, 513, 16)]
# with prompts, every size is recorded with each number of tokens
DECODES_BESIDE_CHUNKS = [8, 32, 64, 128, 256, 512]
CHUNK_TOKENS = [16, 64, 128, 256, 512, 1024]
MAX_CHUNKS = 8


class Size(NamedTuple):
    """Room in a recording: for sequences with one token each, then for chunks of prompts."""

    decodes: int
    tokens: int = 0  # of up to MAX_CHUNKS chunks


def graph_sizes(limits: Limits) -> list[Size]:
    """What to record, the smallest first. Larger steps run eagerly."""
    sizes = [Size(decodes) for decodes in up_to(limits.max_num_seqs, DECODES)]
    for decodes in up_to(limits.max_num_seqs, DECODES_BESIDE_CHUNKS):
        for tokens in up_to(limits.max_num_batched_tokens, CHUNK_TOKENS):
            sizes.append(Size(decodes, tokens))
    return sorted(sizes, key=sum)


def up_to(limit: int, values: list[int]) -> list[int]:
    """The values below the limit, and the first one that is not."""
    smaller = [0, *values]
    return [value for value, before in zip(values, smaller) if before < limit]


class StepGraphs:
    """A model, recorded for several sizes of a step. All graphs read their inputs from one buffer.

    A graph replays the same kernels with the same arguments at the same addresses. So inputs are
    copied to the addresses that were recorded, and unused rows are padding. Block tables come last:
    they may have any length. Without CUDA, recording and replay are plain calls; everything else is
    the same.
    """

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        kv_cache: KVCache,
        limits: Limits,
    ):
        self.model = model
        self.ops = ops
        self.kv_cache = kv_cache
        self.limits = limits
        self.device = kv_cache.tensor.device
        self.sizes = graph_sizes(limits)
        max_blocks_per_seq = -(-limits.max_model_len // kv_cache.block_size)
        self.max_table_blocks = (self.sizes[-1].decodes + MAX_CHUNKS) * max_blocks_per_seq
        self.buffer = torch.zeros(self._max_bytes(), dtype=torch.uint8, device=self.device)
        self.replays: dict[Size, Callable[[], Tensor]] = {}
        self.pool: Any = None
        self.stream: Any = None
        if self.device.type != "cpu":
            # one for all recordings: memory and cuBLAS' workspaces are reused within a stream
            self.stream = torch.cuda.Stream(self.device)

    def _max_bytes(self) -> int:
        """What the inputs of any step take: the most rows and blocks, all of Sampling."""
        step = self.padding(self.sizes[-1])
        step.batch.block_tables = torch.zeros(self.max_table_blocks, dtype=torch.int32)
        largest = torch.zeros(self.limits.max_num_seqs, dtype=torch.int64)
        step.sampling = Sampling(
            temperature=largest,
            seed=largest,
            position=largest,
            top_k=largest,
            top_p=largest,
            min_p=largest,
        )
        num_rows = self.limits.max_num_seqs + self.limits.max_num_batched_tokens
        step.sampled_rows = torch.zeros(num_rows, dtype=torch.int64)
        return buffer_slices(step.tensors)[-1].stop

    def padding(self, size: Size) -> StepInputs:
        """A step in which nothing is computed: no slot to write to, no context to read."""
        num_rows = size.decodes + size.tokens
        num_seqs = size.decodes + (MAX_CHUNKS if size.tokens else 0)
        no_block = torch.zeros(1, dtype=torch.int32)  # an empty tensor has no address to record
        ends = torch.arange(num_seqs + 1, dtype=torch.int32)
        batch = Batch(
            self.kv_cache,
            slot_mapping=torch.full((num_rows,), -1),
            cu_seqlens_q=ends.clamp(max=size.decodes),  # chunks without tokens
            context_lens=torch.zeros(num_seqs, dtype=torch.int32),
            cu_blocks=torch.zeros(num_seqs + 1, dtype=torch.int32),
            block_tables=no_block,
            num_decodes=size.decodes,
            max_context=self.limits.max_model_len,
        )
        return StepInputs(
            input_ids=torch.zeros(num_rows, dtype=torch.int64),
            positions=torch.zeros(num_rows, dtype=torch.int64),
            batch=batch,
            sampled_rows=torch.zeros(0, dtype=torch.int64),
        )

    @torch.inference_mode()
    def record(self, size: Size) -> None:
        """Record the largest size first; the smaller ones then reuse its memory."""
        step = self.padding(size).to(self.device, self.buffer)
        step.batch.layout = self.ops.layout(step.batch)
        call: Callable[[], Tensor]
        call = partial(self.model, step.input_ids, step.positions, step.batch)
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

    def size_for(self, step: StepInputs) -> Size | None:
        """The smallest recording that can compute the step. None if there is none."""
        batch = step.batch
        tokens = len(step.input_ids) - batch.num_decodes
        chunks = len(batch.context_lens) - batch.num_decodes
        # some block managers reserve more than a sequence can fill
        if chunks > MAX_CHUNKS or len(batch.block_tables) > self.max_table_blocks:
            return None
        for size in self.sizes:
            has_room = size.decodes >= batch.num_decodes and size.tokens >= tokens
            if has_room and (size.tokens > 0) == (tokens > 0):
                return size
        return None

    def run(self, step: StepInputs, size: Size) -> tuple[Tensor, StepInputs]:
        """Hidden states of a step, and the step as it was computed: padded, on the device."""
        step = self.padded(step, size)
        step = step.to(self.device, self.buffer)
        return self.replays[size](), step

    def padded(self, step: StepInputs, size: Size) -> StepInputs:
        """A step in the shapes of a recording: decodes, padding, chunks, padding.

        The rows to sample from move with their chunks; how they are sampled is not recorded.
        """
        rows = self.padding(size)
        first = step.batch.num_decodes  # of the chunks
        inputs = step.model_inputs
        for name, whole in rows.model_inputs.items():
            if name != "block_tables":
                whole[:first] = inputs[name][:first]
        rows.batch.block_tables = step.batch.block_tables
        sampled_rows = step.sampled_rows
        if size.tokens:
            place_chunks(step, rows)
            sampled_rows = sampled_rows + (size.decodes - first) * (sampled_rows >= first)
        return replace(rows, sampled_rows=sampled_rows, sampling=step.sampling)


def place_chunks(step: StepInputs, rows: StepInputs) -> None:
    """Lays the tokens and sequences of a step behind its decodes over those of the padding."""
    first = step.batch.num_decodes
    place = rows.batch.num_decodes
    inputs = step.model_inputs
    for name, whole in rows.model_inputs.items():
        if name != "block_tables":
            chunks = inputs[name][first:]
            whole[place : place + len(chunks)] = chunks
    ends = rows.batch.cu_seqlens_q[place:]
    num_chunks = len(step.batch.context_lens) - first
    ends[num_chunks:] = ends[num_chunks]  # the others have no tokens
    ends += place - first
